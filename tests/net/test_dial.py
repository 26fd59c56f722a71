from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.errors import AgentError, LinkError, RegistrationRefusedError
from asyncgrpo_agent.net.dial import keep_dialled
from asyncgrpo_agent.net.link import Link
from fakes.links import unstarted_pair

ADDRESSES = ["one:1", "two:2"]


class TopRandom(Random):
    """Draws the upper end, so that every wait is exactly the ceiling."""

    def uniform(self, a: float, b: float) -> float:
        return b


def refused(retry_after_s: float = 0.0, *, permanent: bool = False) -> RegistrationRefusedError:
    return RegistrationRefusedError("no", permanent=permanent, retry_after_s=retry_after_s)


@dataclass(slots=True)
class Scenario:
    """What each attempt meets: an error on connecting, or a link that ends after some seconds."""

    rows: Sequence[tuple[str, float, BaseException | None]]
    dialled: list[tuple[float, str]] = field(default_factory=list)
    downs: list[tuple[str, float]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    async def connect(self, address: str) -> Link:
        self.dialled.append((trio.current_time(), address))
        if len(self.dialled) > len(self.rows):
            await trio.sleep_forever()
        kind, after_s, error = self.rows[len(self.dialled) - 1]
        if kind == "connect":
            await trio.sleep(after_s)
            raise error or AssertionError("a failing connect needs an error")
        link, _, _ = unstarted_pair()
        self.links.append(link)
        return link

    async def serve(self, link: Link) -> None:
        _, after_s, error = self.rows[len(self.dialled) - 1]
        await trio.sleep(after_s)
        if error is not None:
            raise error

    def on_down(self, error: AgentError, retry_in_s: float) -> None:
        self.downs.append((error.what, retry_in_s))

    async def play(self) -> list[float]:
        """The times of all attempts, up to the one that the rows do not cover."""
        with trio.move_on_after(3600):
            await keep_dialled(
                lambda: ADDRESSES,
                self.connect,
                self.serve,
                backoff=Backoff(TopRandom()),
                on_down=self.on_down,
            )
        return [at for at, _ in self.dialled]


async def test_failures_to_connect_back_off_and_rotate(autojump_clock: MockClock) -> None:
    unreachable = OSError("refused")
    scenario = Scenario([("connect", 0.5, unreachable)] * 7)
    assert await scenario.play() == [0, 1.5, 4, 8.5, 17, 33.5, 64, 94.5]
    assert [address for _, address in scenario.dialled] == ["one:1", "two:2"] * 4
    assert scenario.downs[0] == ("refused", 1)


async def test_healthy_link_resets_the_backoff(autojump_clock: MockClock) -> None:
    lost = LinkError("lost")
    scenario = Scenario(
        [("connect", 0, lost), ("connect", 0, lost), ("link", 30, lost), ("link", 29, lost)]
    )
    assert await scenario.play() == [0, 1, 3, 3 + 30 + 1, 34 + 29 + 2]


async def test_first_login_that_fails_is_tried_again(autojump_clock: MockClock) -> None:
    scenario = Scenario([("link", 0, refused()), ("link", 5, None), ("link", 0, OSError("x"))])
    assert await scenario.play() == [0, 1, 8, 12]
    assert [what for what, _ in scenario.downs] == ["no", "the link was closed here", "x"]


async def test_retry_after_is_honoured_on_top_of_the_jitter(autojump_clock: MockClock) -> None:
    scenario = Scenario(
        [("link", 0, refused(20)), ("link", 0, refused(1e9)), ("link", 0, refused(-5))]
    )
    assert await scenario.play() == [0, 21, 21 + 602, 623 + 4]


async def test_permanent_refusal_ends_the_loop(autojump_clock: MockClock) -> None:
    scenario = Scenario([("connect", 0, LinkError("x")), ("link", 0, refused(permanent=True))])
    with pytest.raises(RegistrationRefusedError):
        await scenario.play()
    assert len(scenario.dialled) == 2


async def test_errors_that_come_through_nurseries_count(autojump_clock: MockClock) -> None:
    lost = LinkError("lost")
    scenario = Scenario(
        [
            ("link", 0, ExceptionGroup("", [lost, ExceptionGroup("", [OSError("x")])])),
            ("link", 0, ExceptionGroup("", [lost, refused(permanent=True)])),
        ]
    )
    with pytest.raises(RegistrationRefusedError):
        await scenario.play()
    assert scenario.downs == [("lost", 1)]


async def test_bugs_end_the_loop(autojump_clock: MockClock) -> None:
    scenario = Scenario([("link", 0, ExceptionGroup("", [LinkError("lost"), KeyError("bug")]))])
    with pytest.RaisesGroup(KeyError):
        await scenario.play()
    assert all(link.closed for link in scenario.links)


async def test_every_link_is_closed_behind_its_service(autojump_clock: MockClock) -> None:
    scenario = Scenario([("link", 1, None), ("link", 1, LinkError("lost"))])
    await scenario.play()
    assert [link.closed for link in scenario.links] == [True, True]


async def test_each_disconnect_is_one_line_and_outages_get_loud_slowly(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = LinkError("lost", where="proxy")
    caplog.set_level("INFO")
    scenario = Scenario([("link", 2, lost), *[("connect", 0, lost)] * 16, ("link", 1, None)])
    await scenario.play()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [
        ("WARNING", "link.lost"),
        *[("INFO", "link.unreachable")] * 3,
        *[("WARNING", "link.unreachable")] * 2,
        ("INFO", "link.closed"),
    ]
    assert vars(caplog.records[0])["agent_fields"] == {
        "proxy": "far",
        "reason": "lost",
        "up_s": 2.0,
    }
