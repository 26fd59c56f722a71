from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles import proxy_admission
from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.store.audit import audit_file
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.links import refuse, unstarted_pair

START_S = 1_000_000.0


def unix_time_s() -> float:
    """A wall clock that goes with trio's."""
    return START_S + trio.current_time()


def made(
    state: Path,
    *,
    role: str = "replica",
    run: str = "demo",
    life_s: float | None = None,
    uses: int | None = None,
) -> str:
    return tokens.create_token(
        state, role=role, run=run, now_unix_s=START_S, life_s=life_s, uses=uses
    )


def hello(token: str, instance: str = "i1") -> m.Hello:
    return m.Hello(m.PROTOCOL, "replica", "demo", "r1", instance, "1.0", token)


def answer(admission: Admission, message: m.Hello, role: str = "replica") -> tuple[str, str]:
    link, _, _ = unstarted_pair()
    refused = admission.admit(link, message, role)
    return ("", "") if refused is None else (refused.kind, refused.reason)


def revoke(state: Path, token: str) -> None:
    facts = tokens.find_token(state, token)
    assert facts is not None
    tokens.revoke_token(state, facts.id, now_unix_s=START_S)


async def test_refusals_say_why(tmp_path: Path) -> None:
    admission = Admission(tmp_path, unix_time_s)
    good, old, revoked = made(tmp_path), made(tmp_path, life_s=0.0), made(tmp_path)
    revoke(tmp_path, revoked)
    replace = msgspec.structs.replace
    assert answer(admission, hello(good)) == ("", "")
    for message, role, refusal in (
        (hello("x"), "replica", ("permanent", "the token is not valid for this run")),
        (
            replace(hello(good), run="other"),
            "replica",
            ("permanent", "the token is not valid for this run"),
        ),
        (hello(good), "trainer", ("permanent", "the token is for a replica, not for a trainer")),
        (
            replace(hello(good), role="trainer"),
            "trainer",
            ("permanent", "the token is for a replica, not for a trainer"),
        ),
        (hello(old), "replica", ("permanent", "the token has expired")),
        (hello(revoked), "replica", ("permanent", "the token was revoked")),
        (
            replace(hello(good), protocol=9),
            "replica",
            ("version", "protocol 9 here meets protocol 1 at the proxy"),
        ),
    ):
        assert answer(admission, message, role) == refusal


async def test_a_trainers_token_is_for_its_run_and_role(tmp_path: Path) -> None:
    admission = Admission(tmp_path, unix_time_s)
    token = made(tmp_path, role="trainer", uses=1)
    for run in ("other", "*", "", "../demo", "demo\0", "DEMO"):
        message = msgspec.structs.replace(hello(token), role="trainer", run=run)
        assert answer(admission, message, "trainer") == (
            "permanent",
            "the token is not valid for this run",
        )
    assert answer(admission, hello(token), "replica")[0] == "permanent"
    good = msgspec.structs.replace(hello(token), role="trainer")  # none of that cost its one use
    assert answer(admission, good, "trainer") == ("", "")
    again = msgspec.structs.replace(good, instance="i2")
    assert answer(admission, again, "trainer") == ("permanent", "the token has no uses left")


async def test_strangers_who_are_refused_fill_no_file(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    admission = Admission(tmp_path, unix_time_s)
    for number in range(1000):
        admission.note_refusal("link.refused", "the token is not valid", peer=f"h:{number}")
    await trio.sleep(11)
    admission.note_refusal("link.refused", "the token is not valid", peer="h:last")
    lines = audit_file(tmp_path).read_text().splitlines()
    assert [json.loads(line)["held_back"] for line in lines] == [0, 999]
    assert json.loads(lines[-1])["peer"] == "h:last"
    assert caplog.text.count("link.refused") == 2


async def test_links_of_one_token_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_admission, "MAX_LINKS_OF_TOKEN", 2)
    admission, token = Admission(tmp_path, unix_time_s), made(tmp_path)
    links = [unstarted_pair()[0] for _ in range(3)]
    assert [admission.admit(link, hello(token), "replica") for link in links[:2]] == [None, None]
    full = "too many links are up on the token"
    assert answer(admission, hello(token)) == ("retry", full)
    assert admission.admit_reader(links[2], token, "demo") == full
    assert answer(admission, hello(made(tmp_path))) == ("", "")  # another token has its own
    admission.leave(links[0])
    assert answer(admission, hello(token)) == ("", "")


async def test_uses_are_spent_by_processes_that_were_let_in(tmp_path: Path) -> None:
    token = made(tmp_path, uses=1)
    admission = Admission(tmp_path, unix_time_s)
    assert answer(admission, hello(token), "trainer")[0] == "permanent"  # costs no use
    assert answer(admission, hello(token, "i1")) == ("", "")
    assert answer(admission, hello(token, "i1")) == ("", "")
    restarted = Admission(tmp_path, unix_time_s)
    assert answer(restarted, hello(token, "i1")) == ("", "")
    assert answer(restarted, hello(token, "i2")) == ("permanent", "the token has no uses left")


async def test_a_use_that_cannot_be_kept_is_not_given(tmp_path: Path) -> None:
    counted, free = made(tmp_path, uses=1), made(tmp_path)
    admission = Admission(tmp_path, unix_time_s)
    (tmp_path / "proxy" / "tokens.json.new").mkdir()  # in the way of every write
    assert answer(admission, hello(counted))[0] == "retry"
    assert answer(admission, hello(free)) == ("", "")


@pytest.mark.parametrize("run", ["demo", tokens.ALL_RUNS])
async def test_a_viewer_is_no_agent_and_takes_no_adapters(tmp_path: Path, run: str) -> None:
    token = made(tmp_path, role="viewer", run=run)
    admission = Admission(tmp_path, unix_time_s)
    for role in ("replica", "trainer"):
        for named in ("demo", "*"):
            message = msgspec.structs.replace(hello(token), role=role, run=named)
            assert answer(admission, message, role)[0] == "permanent"
    link, _, _ = unstarted_pair()
    assert admission.admit_reader(link, token, "demo")


async def test_viewers_log_in_as_often_as_they_may(tmp_path: Path) -> None:
    admission = Admission(tmp_path, unix_time_s)
    token = made(tmp_path, role="viewer", uses=1)
    link, other, _ = unstarted_pair()
    for _ in range(2):
        facts = admission.admit_viewer(link, token, "s1")
        assert isinstance(facts, tokens.TokenFacts)
        assert facts.shows("demo")
        assert not facts.shows("else")
    assert admission.admit_viewer(other, token, "s2") == "the token has no uses left"
    another = made(tmp_path, role="viewer")
    assert admission.admit_viewer(link, another, "s3") == "the connection is that of another token"
    admission.leave(link)
    assert isinstance(admission.admit_viewer(link, another, "s3"), tokens.TokenFacts)
    for bad, reason in (
        (made(tmp_path), "the token is not a viewer's"),
        ("x", "the token is not a viewer's"),
        (made(tmp_path, role="viewer", life_s=0.0), "the token has expired"),
    ):
        assert admission.admit_viewer(other, bad, "s4") == reason


async def test_a_viewers_link_is_closed_when_its_token_is_revoked(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    token = made(tmp_path, role="viewer", run=tokens.ALL_RUNS)
    admission = Admission(tmp_path, unix_time_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.watch)
        here, there, _ = unstarted_pair()
        await nursery.start(here.run, refuse)
        assert isinstance(admission.admit_viewer(here, token, "s1"), tokens.TokenFacts)
        revoke(tmp_path, token)
        with pytest.raises(LinkError, match="the token was revoked"):
            await there.run(refuse)
        nursery.cancel_scope.cancel()


@dataclass
class Peer:
    """A replica that was let in: the proxy's end of its link, and how its own end ended."""

    link: Link
    ended: trio.Event
    reason: str = ""

    @property
    def is_up(self) -> bool:
        return not self.ended.is_set()


async def let_in(admission: Admission, token: str, nursery: trio.Nursery) -> Peer:
    here, there, _ = unstarted_pair()
    peer = Peer(here, trio.Event())

    async def replica() -> None:
        try:
            await there.run(refuse)
        except LinkError as error:
            peer.reason = error.what
        peer.ended.set()

    await nursery.start(here.run, refuse)
    nursery.start_soon(replica)
    assert admission.admit(here, hello(token), "replica") is None
    for link in (here, there):
        link.authenticated(AUTHENTICATED, 10.0, 10.0)
    return peer


async def test_a_link_on_a_revoked_token_is_closed_within_a_second(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    old, new = made(tmp_path), made(tmp_path)
    admission = Admission(tmp_path, unix_time_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.watch)
        bad = await let_in(admission, old, nursery)
        good = await let_in(admission, new, nursery)
        began = trio.current_time()
        await trio.sleep(30)
        assert bad.is_up
        revoke(tmp_path, old)
        await bad.ended.wait()
        assert trio.current_time() - began == pytest.approx(30.5, abs=0.6)
        assert bad.reason == "the peer closed the connection: the token was revoked"
        await trio.sleep(30)
        assert good.is_up
        nursery.cancel_scope.cancel()


async def test_a_link_ends_when_its_token_expires(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    token = made(tmp_path, life_s=45)
    admission = Admission(tmp_path, unix_time_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.watch)
        peer = await let_in(admission, token, nursery)
        await peer.ended.wait()
        assert unix_time_s() - START_S == pytest.approx(45, abs=1.1)
        assert peer.reason.endswith("the token has expired")
        nursery.cancel_scope.cancel()


async def test_a_damaged_file_closes_nothing_and_a_missing_row_does(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    token = made(tmp_path)
    file = tokens.tokens_file(tmp_path)
    admission = Admission(tmp_path, unix_time_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.watch)
        peer = await let_in(admission, token, nursery)
        await trio.sleep(5)
        file.write_text("{")
        await trio.sleep(5)
        assert peer.is_up
        assert caplog.text.count("tokens.unreadable") == 1
        file.write_text("[]")
        await peer.ended.wait()
        assert peer.reason.endswith("the token is gone")
        nursery.cancel_scope.cancel()


async def test_a_link_that_left_is_not_watched(tmp_path: Path, autojump_clock: MockClock) -> None:
    token = made(tmp_path)
    admission = Admission(tmp_path, unix_time_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.watch)
        peer = await let_in(admission, token, nursery)
        admission.leave(peer.link)
        admission.leave(peer.link)
        revoke(tmp_path, token)
        await trio.sleep(5)
        assert peer.is_up
        nursery.cancel_scope.cancel()
