"""Replicas that an operator wants gone, with the command itself as the other side."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from asyncgrpo_agent import drain_command
from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.roles.proxy_drain import REASON, DrainDesk
from asyncgrpo_agent.roles.proxy_run import ReplicaLink, Runs
from asyncgrpo_agent.store import drain_orders
from asyncgrpo_agent.wire import messages as m
from fakes.links import linked_pair
from fakes.upstreams import BASE, Platform, row_of


@dataclass
class Told:
    """A control channel that keeps what is sent."""

    messages: list[m.FromAcceptor] = field(default_factory=list)

    async def send(self, message: m.FromAcceptor) -> None:
        await trio.lowlevel.checkpoint()
        self.messages.append(message)


@dataclass
class Site:
    """A desk, its runs, and the command beside it."""

    nursery: trio.Nursery
    state: Path
    runs: Runs = field(default_factory=Runs)
    told: dict[str, Told] = field(default_factory=dict)

    async def open(self) -> None:
        self.nursery.start_soon(DrainDesk(self.state, self.runs).serve)
        await trio.testing.wait_all_tasks_blocked()

    async def join(self, name: str, run: str = "demo", instance: str = "i1") -> ReplicaLink:
        run_ = self.runs.open(run)
        near, _ = await linked_pair(self.nursery)
        replica = run_.fleet.join(name, instance, 4, trio.current_time())
        replicas.engine_up(replica, trio.current_time())
        self.told[name] = Told()
        here = ReplicaLink(replica=replica, link=near, control=self.told[name])
        run_.links[name] = here
        return here

    async def drain(self, name: str, run: str = "", *, wait: bool = False) -> None:
        options = argparse.Namespace(name=name, run=run, wait=wait, timeout=10.0)
        await drain_command.drain(self.state, options)


@pytest.fixture
async def site(nursery: trio.Nursery, tmp_path: Path) -> Site:
    return Site(nursery, tmp_path)


async def test_a_drained_replica_gets_nothing_new_and_is_told_to_finish(
    site: Site, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    await site.open()
    here, other = await site.join("r1"), await site.join("r2")
    replicas.started(here.replica, 10, trio.current_time())
    began = trio.current_time()
    await site.drain("r1")
    assert trio.current_time() - began < 1.0
    assert (here.replica.state, here.replica.reason) == (State.DRAINING, REASON)
    assert not replicas.takes_requests(here.replica, trio.current_time())
    assert site.told["r1"].messages == [m.Finish(REASON)]
    assert (other.replica.state, site.told["r2"].messages) == (State.READY, [])
    assert capsys.readouterr().err == "replica r1 of run demo drains: 1 rollout in flight\n"
    await trio.sleep(5)
    assert list(drain_orders.orders_folder(site.state).iterdir()) == []


async def test_waiting_ends_when_it_has_gone(
    site: Site,
    nursery: trio.Nursery,
    autojump_clock: MockClock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await site.open()
    here = await site.join("r1")

    async def leave() -> None:
        await trio.sleep(100)
        site.runs["demo"].leave(here, "link ended", trio.current_time())

    nursery.start_soon(leave)
    began = trio.current_time()
    await site.drain("r1", wait=True)
    assert 100 <= trio.current_time() - began < 102
    assert capsys.readouterr().err.endswith("replica r1 of run demo has gone\n")


async def test_a_proxy_that_ends_meanwhile_is_noticed(
    site: Site, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    await site.join("r1")
    began = trio.current_time()

    async def serve() -> None:
        with trio.move_on_after(20):
            await DrainDesk(site.state, site.runs).serve()

    nursery.start_soon(serve)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(AgentError, match="the proxy has said nothing for 10 s") as caught:
        await site.drain("r1", wait=True)
    assert 29 <= trio.current_time() - began < 31
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("name", "run", "text"),
    [
        ("r9", "", r"there is no replica 'r9'\. Registered now: r1 of run demo, r1 of run other$"),
        ("r1", "x", r"there is no replica 'r1' in run 'x'\. Registered now: r1 of run demo"),
        ("r9", "demo", r"no replica 'r9' in run 'demo'\. Registered now: r1 of run demo$"),
        ("r1", "", r"a replica 'r1' in each of the runs demo, other\. Say which: --run RUN"),
    ],
)
async def test_a_name_that_is_none_or_two(
    site: Site, autojump_clock: MockClock, name: str, run: str, text: str
) -> None:
    await site.open()
    links = [await site.join("r1"), await site.join("r1", "other")]
    with pytest.raises(AgentError, match=text) as caught:
        await site.drain(name, run)
    assert caught.value.exit_code == 1
    assert str(site.state) in str(caught.value)
    assert [link.replica.state for link in links] == [State.READY, State.READY]
    await site.drain("r1", "other")
    assert [link.replica.state for link in links] == [State.READY, State.DRAINING]


async def test_a_proxy_without_replicas(site: Site, autojump_clock: MockClock) -> None:
    await site.open()
    with pytest.raises(AgentError, match="None is registered now"):
        await site.drain("r1")


async def test_nobody_who_answers(site: Site, autojump_clock: MockClock) -> None:
    with pytest.raises(AgentError, match="no proxy has run with this state folder") as caught:
        await site.drain("r1")
    assert "--state-dir DIR" in caught.value.fix
    drain_orders.open_folder(site.state)
    began = trio.current_time()
    with pytest.raises(AgentError, match="no proxy answered within 10 s"):
        await site.drain("r1")
    assert trio.current_time() - began == pytest.approx(10)
    here = await site.join("r1")
    await site.open()
    await trio.sleep(5)
    assert here.replica.state is State.READY  # nothing of it is left for a proxy that comes late


async def test_a_folder_that_cannot_be_made_costs_the_proxy_nothing(
    site: Site, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    (site.state / "proxy").write_text("")
    await site.open()
    assert caplog.text.count("drain.unavailable") == 1


async def test_an_upstream_stays_and_gets_nothing(
    nursery: trio.Nursery,
    tmp_path: Path,
    autojump_clock: MockClock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    platform = Platform(nursery, tmp_path)
    seat = await platform.join("a", await platform.expose("a"))
    site = Site(nursery, tmp_path / "state")
    site.runs[platform.run.name] = platform.run
    await site.open()
    platform.run.finished = "training finished"  # by which upstreams are not told to go
    replicas.started(seat.here.replica, 10, trio.current_time())

    async def finish() -> None:
        await trio.sleep(7)
        replicas.finished(seat.here.replica, 10, ok=True, now=trio.current_time())

    nursery.start_soon(finish)
    began = trio.current_time()
    await site.drain("a", wait=True)
    assert 7 <= trio.current_time() - began < 9
    shown = capsys.readouterr().err
    assert "it has no agent: stop it yourself" in shown
    assert shown.endswith(f"replica a of run {platform.run.name} runs nothing any more\n")
    await trio.sleep(60)
    row = row_of(platform.run, seat.here)
    assert (row.state, row.reason) == ("DRAINING", REASON)
    assert (await platform.ask(BASE, deadline_s=5))[0].status == 503
