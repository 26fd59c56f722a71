"""Replicas that come in at the proxy's door: whose name it is, and who has to go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import MockClock

from asyncgrpo_agent.core.names import duplicate_reason
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ControlChannel
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.roles.proxy_drain import drain_replica
from asyncgrpo_agent.roles.proxy_names import ReplicaNames
from asyncgrpo_agent.roles.proxy_replica import DUPLICATE_RETRY_S, ReplicaDoor
from asyncgrpo_agent.roles.proxy_run import ProxyRun, Runs
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.store.host_bindings import HostBindings
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE
from asyncgrpo_agent.wire.host_proof import with_proof
from fakes.links import refuse, unstarted_pair

START_S = 1_000_000.0
ADAPTER = "demo.a0001-7f3c.v000001.abcd"
Answer = Callable[[str], m.Hello]  # the hello that a peer gives to a nonce
replace = msgspec.structs.replace


def unix_time_s() -> float:
    return START_S + trio.current_time()


@dataclass
class Peer:
    """A replica's own end of one link: what it was told, and why the link ended."""

    told: list[m.FromAcceptor] = field(default_factory=list)
    hello: m.Hello | None = None
    control: ControlChannel[m.FromDialler, m.FromAcceptor] | None = None
    answered: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    leave: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        """What it was accepted as."""
        accepted = self.told[0]
        assert isinstance(accepted, m.Accepted), accepted
        return accepted.name

    @property
    def refusal(self) -> m.Refused:
        refused = self.told[-1]
        assert isinstance(refused, m.Refused), refused
        return refused


@dataclass
class Site:
    """The door of one proxy, and hosts that join there, each in a task of `nursery`."""

    nursery: trio.Nursery
    state: Path
    door: ReplicaDoor = field(init=False)
    token: str = field(init=False)

    def __post_init__(self) -> None:
        names = ReplicaNames(Runs(), HostBindings(self.state, unix_time_s()), unix_time_s)
        self.door = ReplicaDoor(Admission(self.state, unix_time_s), names)
        self.token = tokens.create_token(
            self.state, role="replica", run="demo", now_unix_s=unix_time_s()
        )

    @property
    def run(self) -> ProxyRun:
        return self.door.names.runs["demo"]

    def hello(self, instance: str, name: str = "r1") -> m.Hello:
        return m.Hello(m.PROTOCOL, "replica", "demo", name, instance, "1.0", self.token, 4)

    async def join(self, key: Ed25519PrivateKey | None, instance: str, name: str = "r1") -> Peer:
        """Until the proxy has accepted or refused it."""
        hello = self.hello(instance, name)
        return await self.say(lambda nonce: with_proof(hello, nonce, key) if key else hello)

    async def say(self, answer: Answer) -> Peer:
        near, far, _ = unstarted_pair()
        peer = Peer()
        self.nursery.start_soon(self._serve, near)
        self.nursery.start_soon(_replica, peer, far, answer)
        await peer.answered.wait()
        return peer

    async def _serve(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, refuse)
            with suppress(LinkError):
                await self.door.serve(link)
            await link.aclose("control stream ended")
            nursery.cancel_scope.cancel()
        self.door.admission.leave(link)


async def _replica(peer: Peer, link: Link, answer: Answer) -> None:
    async def serve(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        peer.control = ControlChannel(stream, FROM_ACCEPTOR)
        challenge = await peer.control.receive()
        assert isinstance(challenge, m.Challenge)
        peer.hello = answer(challenge.nonce)
        await peer.control.send(peer.hello)
        while True:
            peer.told.append(await peer.control.receive())
            peer.answered.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_leave, peer, link)
        with suppress(LinkError):
            await link.run(serve)
        peer.ended.set()
        peer.answered.set()
        nursery.cancel_scope.cancel()


async def _leave(peer: Peer, link: Link) -> None:
    await peer.leave.wait()
    await link.aclose("leaving")


async def gone(peer: Peer) -> None:
    """It leaves in good order, and both ends are done with it."""
    peer.leave.set()
    await peer.ended.wait()
    await trio.testing.wait_all_tasks_blocked()


def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def site(nursery: trio.Nursery, tmp_path: Path) -> Site:
    return Site(nursery, tmp_path)


async def test_a_host_that_is_back_has_its_name_at_once_and_its_ghost_goes(
    site: Site, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    host = key()
    ghost = await site.join(host, "i1")
    began = trio.current_time()
    back = await site.join(host, "i2")
    assert trio.current_time() == began
    assert (ghost.name, back.name) == ("r1", "r1")
    assert [replica.instance for replica in site.run.fleet] == ["i2"]
    assert caplog.text.count("replica.evicted_ghost") == 1
    await ghost.ended.wait()
    assert ghost.refusal == m.Refused("duplicate", duplicate_reason("r1"), DUPLICATE_RETRY_S)
    assert not back.ended.is_set()
    assert [replica.instance for replica in site.run.fleet] == ["i2"]


async def test_a_process_that_dials_again_replaces_its_own_link(site: Site) -> None:
    host = key()
    first = await site.join(host, "i1")
    again = await site.join(host, "i1")
    await first.ended.wait()
    assert again.name == "r1"
    assert [replica.instance for replica in site.run.fleet] == ["i1"]
    third = await site.join(host, "i1")
    assert third.name == "r1"


async def test_a_link_that_lost_its_name_is_not_heard(site: Site) -> None:
    host = key()
    ghost = await site.join(host, "i1")
    assert ghost.control is not None
    back = await site.join(host, "i2")
    with suppress(LinkError):  # it may have noticed already
        await ghost.control.send(m.Holdings([ADAPTER]))
    await ghost.ended.wait()
    assert site.run.fleet.replicas["r1"].loaded == frozenset()
    await gone(back)
    assert list(site.run.fleet) == []


async def test_two_processes_of_one_host_do_not_push_each_other_out_for_ever(site: Site) -> None:
    host = key()
    older, newer = await site.join(host, "i1"), await site.join(host, "i2")
    await older.ended.wait()
    for _ in range(3):
        again = await site.join(host, "i1")
        assert again.refusal == older.refusal
        assert again.refusal.retry_after_s == DUPLICATE_RETRY_S
        assert "give it another replica.name or another state folder" in again.refusal.reason
        await again.ended.wait()
    assert not newer.ended.is_set()
    assert (await site.join(host, "i2")).name == "r1"  # whose link may break
    assert isinstance((await site.join(host, "i1")).told[0], m.Refused)
    await gone(next_up := await site.join(host, "i2"))
    assert next_up.ended.is_set()
    assert (await site.join(host, "i1")).name == "r1"


async def test_a_stolen_token_pushes_nobody_out(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    host, thief = key(), key()
    first = await site.join(host, "i1")
    stolen = await site.join(thief, "i2")
    assert (first.name, stolen.name) == ("r1", "r1-2")
    assert caplog.text.count("replica.renamed") == 1
    assert "replica.evicted_ghost" not in caplog.text
    await gone(first)
    await gone(stolen)
    assert (await site.join(thief, "i2")).name == "r1-2"  # its own from now on
    assert (await site.join(host, "i3")).name == "r1"


async def test_a_replica_without_a_key_takes_nothing_over(site: Site) -> None:
    host = key()
    old = await site.join(None, "i1", "r0")
    assert old.name == "r0"
    assert (await site.join(None, "i1", "r0")).name == "r0-2"
    assert (await site.join(host, "i2", "r0")).name == "r0-3"
    first = await site.join(host, "i2")
    assert (await site.join(None, "i3")).name == "r1-2"
    await gone(first)
    assert (await site.join(None, "i4")).name == "r1-3"
    assert not old.ended.is_set()
    assert set(site.door.names.bindings.keys("demo")) == {"r0-3", "r1"}


async def test_a_hello_that_was_captured_is_refused(site: Site) -> None:
    host = key()
    first = await site.join(host, "i1")
    captured = first.hello
    assert captured is not None
    replayed = await site.say(lambda _nonce: captured)
    assert replayed.refusal.kind == "permanent"
    assert "does not fit its host key and this connection" in replayed.refusal.reason
    assert "delete hosts/<run>.key" in replayed.refusal.fix
    await replayed.ended.wait()
    assert not first.ended.is_set()


async def test_a_proof_by_another_key_or_for_another_name_is_refused(site: Site) -> None:
    host, thief = key(), key()
    first = await site.join(host, "i1")
    assert first.hello is not None
    known = first.hello.host_key
    hello = site.hello("i2")
    for forged in (
        lambda nonce: replace(with_proof(hello, nonce, thief), host_key=known),
        lambda nonce: replace(with_proof(hello, nonce, thief), name="r2"),
        lambda nonce: replace(with_proof(hello, nonce, thief), host_proof=""),
        lambda nonce: replace(hello, host_key=known),
    ):
        assert (await site.say(forged)).refusal.kind == "permanent"
    assert not first.ended.is_set()
    assert site.door.names.bindings.keys("demo") == {"r1": known}


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "\x1b[2J"])
async def test_names_that_cannot_be_shown_are_refused(site: Site, name: str) -> None:
    refusal = (await site.join(key(), "i1", name)).refusal
    assert (refusal.kind, refusal.reason) == ("permanent", "the replica's name cannot be shown")
    assert "replica.name" in refusal.fix


async def test_strangers_may_say_little_and_replicas_not_much(site: Site) -> None:
    long = await site.join(None, "i" * 20_000)
    assert (long.told, long.ended.is_set()) == ([], True)
    peer = await site.join(None, "i1")
    assert peer.control is not None
    await peer.control.send(m.Holdings(["x" * 200_000]))
    await peer.control.send(m.Holdings(["x" * 300_000]))
    await peer.ended.wait()
    assert list(site.run.fleet) == []


async def test_refused_strangers_fill_no_log(
    site: Site, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    for protocol in range(10):
        hello = replace(site.hello("i1", "n" * 5000), protocol=protocol, token="guessed")
        assert (await site.say(lambda _nonce, hello=hello: hello)).refusal  # type: ignore[misc]
    refused = [vars(r)["agent_fields"] for r in caplog.records if r.msg == "link.refused"]
    assert sorted(fields["reason"][:10] for fields in refused) == ["protocol 0", "the token "]
    assert len(caplog.text) < 2000


async def test_a_proof_is_looked_at_after_the_token(site: Site) -> None:
    site.token = "stolen elsewhere"
    refusal = (await site.join(key(), "i1")).refusal
    assert refusal.reason == "the token is not valid for this run"


async def test_an_engine_that_no_run_can_use_is_sent_away_with_what_to_change(site: Site) -> None:
    peer = await site.join(key(), "i1")
    assert peer.control is not None
    facts = m.EngineFacts("base", "ab", "torch.float32", 512, 8, 16, "0.31.0", api_servers=2)
    await peer.control.send(m.EngineUp(facts))
    await peer.ended.wait()
    assert peer.refusal.kind == "permanent"
    assert "2 API servers" in peer.refusal.reason
    assert "--api-server-count" in peer.refusal.fix
    assert list(site.run.fleet) == []


async def test_one_that_was_told_to_go_is_told_again_on_its_next_link(
    site: Site, autojump_clock: MockClock
) -> None:
    host = key()
    peer = await site.join(host, "i1")
    await drain_replica(site.run, site.run.links["r1"], "drained by command")
    await gone(peer)
    back = await site.join(host, "i1")
    await trio.testing.wait_all_tasks_blocked()
    assert back.told[1:] == [m.Finish("drained by command")]
    assert [replica.state for replica in site.run.fleet] == [State.DRAINING]
    await gone(back)
    started_anew = await site.join(host, "i2")
    await trio.testing.wait_all_tasks_blocked()
    assert len(started_anew.told) == 1
    assert [replica.state for replica in site.run.fleet] == [State.JOINING]


async def test_what_a_replica_costs_is_counted_and_told(
    site: Site, autojump_clock: MockClock
) -> None:
    for name, price in (("dear", 3600.0), ("unknown", 0.0), ("odd", -5.0)):
        hello = replace(site.hello("i1", name), price_per_hour=price)
        await site.say(lambda _nonce, hello=hello: hello)  # type: ignore[misc]
    await trio.sleep(2)
    fleet = site.run.snapshot(trio.current_time())
    assert {row.name: row.price_per_hour for row in fleet.replicas} == {
        "dear": 3600.0,
        "unknown": 0.0,
        "odd": 0.0,
    }
    assert fleet.replica_hours == pytest.approx(6 / 3600, rel=0.001)
    assert fleet.unpriced_hours == pytest.approx(4 / 3600, rel=0.001)
    assert fleet.cost == pytest.approx(2.0, rel=0.001)
