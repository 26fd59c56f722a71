"""Trainers at the proxy's door: one run has one trainer, that of the newest attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.core.adapters import parse_attempt
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ControlChannel
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.roles.proxy_admission import REFUSED_PAUSE_S
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import STRANGERS
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST
from fakes.links import refuse, unstarted_pair

UNIX_S = 1_000_000.0


@dataclass
class Trainer:
    """A trainer's own end of one link: what it was told, and why the link ended."""

    answer: m.FromAcceptor | None = None
    reason: str = ""
    answered: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def attempt(self) -> str:
        assert isinstance(self.answer, m.Accepted), self.answer
        return self.answer.attempt


@dataclass
class Site:
    """One proxy, and trainers that dial it, each in a task of `nursery`."""

    nursery: trio.Nursery
    state: Path
    proxy: Proxy = field(init=False)
    token: str = field(init=False)

    def __post_init__(self) -> None:
        self.proxy = Proxy(Config(role="proxy", agent=Agent(state_dir=str(self.state))))
        self.proxy.admission.unix_time_s = lambda: UNIX_S
        self.token = tokens.create_token(self.state, role="trainer", run="demo", now_unix_s=UNIX_S)

    @property
    def run(self) -> ProxyRun:
        return self.proxy.runs["demo"]

    def dial(self, attempt: str = "") -> Trainer:
        far, near, _ = unstarted_pair()
        trainer = Trainer()
        self.nursery.start_soon(self._serve, near)
        hello = m.Hello(
            m.PROTOCOL,
            "trainer",
            "demo",
            "host",
            "i",
            "1.0",
            self.token,
            attempt=attempt,
            max_staleness=4,
        )
        self.nursery.start_soon(_register, trainer, far, hello)
        return trainer

    async def _serve(self, link: Link) -> None:
        try:
            await self.proxy._serve_link(link, m.ALPN_FORWARD, "")
        except* LinkError:
            pass  # as whoever accepted it does

    async def join(self, attempt: str = "") -> Trainer:
        trainer = self.dial(attempt)
        await trainer.answered.wait()
        return trainer


async def _register(trainer: Trainer, link: Link, hello: m.Hello) -> None:
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(link.run, refuse)
            stream = await link.open(CONTROL_REQUEST, STRANGERS)
            control: ControlChannel[m.FromDialler, m.FromAcceptor]
            control = ControlChannel(stream, FROM_ACCEPTOR)
            await control.send(hello)
            trainer.answer = await control.receive()
            trainer.answered.set()
            while True:
                await control.receive()
    except* LinkError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        trainer.reason = str(error)
    trainer.answered.set()
    trainer.ended.set()


@pytest.fixture
def site(tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock) -> Site:
    return Site(nursery, tmp_path)


async def test_a_newer_trainer_ends_the_older_one_and_says_so(site: Site) -> None:
    older = await site.join()
    newer = await site.join()
    await older.ended.wait()
    assert f"superseded by attempt {newer.attempt}" in older.reason
    assert parse_attempt(newer.attempt).number == 2
    back = await site.join(older.attempt)
    assert back.answer == m.Refused(
        "permanent", f"attempt {older.attempt} was superseded by {newer.attempt}"
    )
    assert site.run.attempt == newer.attempt
    assert site.run.terms.max_staleness == 4


async def test_of_trainers_that_start_at_once_the_last_attempt_stays(site: Site) -> None:
    await site.join()
    for _ in range(4):
        rivals = [site.dial() for _ in range(3)]
        while sum(rival.ended.is_set() for rival in rivals) < 2:  # noqa: ASYNC110 - any two
            await trio.sleep(0.1)
        await trio.sleep(0.2)
        (stays,) = [rival for rival in rivals if not rival.ended.is_set()]
        assert stays.attempt == site.run.attempt
        assert parse_attempt(stays.attempt).number == max(
            parse_attempt(rival.attempt).number
            for rival in rivals
            if isinstance(rival.answer, m.Accepted)
        )


async def test_of_two_that_come_back_to_a_proxy_without_state_the_newer_stays(site: Site) -> None:
    older = await site.join("a0007-aaaa")
    newer = await site.join("a0008-bbbb")
    await older.ended.wait()
    back = await site.join("a0007-aaaa")
    assert isinstance(back.answer, m.Refused)
    assert site.run.attempt == newer.attempt == "a0008-bbbb"
    assert parse_attempt((await site.join()).attempt).number == 9


async def test_a_wrong_token_is_answered_slowly_and_nobody_is_locked_out(site: Site) -> None:
    for token, pause_s in (("x", REFUSED_PAUSE_S), (site.token, 0.0)) * 2:
        began = trio.current_time()
        site.token = token
        trainer = await site.join()
        assert trio.current_time() - began == pytest.approx(pause_s, abs=0.2)
        assert isinstance(trainer.answer, m.Accepted if pause_s == 0.0 else m.Refused)
