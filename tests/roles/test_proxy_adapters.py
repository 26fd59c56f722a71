"""What the proxy lends, and to whom: one connection in memory, a real mirror, no trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import AdapterPrunedError, LinkError
from asyncgrpo_agent.net.control import (
    ADAPTER,
    FROM_ACCEPTOR,
    FROM_DIALLER,
    ControlChannel,
    read_envelope,
)
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles import proxy_mirror
from asyncgrpo_agent.roles.adapter_link import LinkSource
from asyncgrpo_agent.roles.proxy import Proxy, Visitor
from asyncgrpo_agent.roles.proxy_run import ProxyRun, TrainerSeat
from asyncgrpo_agent.store import identity, tokens
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, Headers, get_request, status_of
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer
from fakes.links import linked_pair, refuse, unstarted_pair

LIST = f"{m.ADAPTERS_PATH}/demo"
NO_TOKEN = (401, "a token is needed\n")
LARGE = 1 << 17  # of a hidden size, makes 8 MiB


@dataclass
class World:
    """A proxy that knows run "demo", and whose mirror holds what was published."""

    folder: Path
    proxy: Proxy
    trainer: FakeTrainer
    keys: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def run(self) -> ProxyRun:
        return self.proxy.runs.open("demo")

    def token(self, role: str = "replica", run: str = "demo", **limits: float) -> str:
        life_s = limits.get("life_s")
        uses = int(limits["uses"]) if "uses" in limits else None
        return tokens.create_token(
            self.state, role=role, run=run, now_unix_s=1.7e9, life_s=life_s, uses=uses
        )

    def revoke(self, token: str) -> None:
        facts = tokens.find_token(self.state, token)
        assert facts is not None
        tokens.revoke_token(self.state, facts.id, now_unix_s=1.7e9)

    async def hold(self, version: int, hidden: int = 64) -> None:
        saved = self.trainer.save(version, hidden=hidden)
        made = self.trainer.publish(version, saved)
        store = await self.proxy.replica_door.mirrors.of(self.run).store()
        incoming = store.begin(made.commit_key, made.sealed)
        for path in sorted(saved.iterdir()):
            incoming.write(path.read_bytes())
        incoming.finish()
        self.keys.append(made.commit_key)
        self.names.append(made.adapter.name)

    async def announce(self, version: int) -> None:
        """As a trainer does, without any bytes."""
        made = self.trainer.publish(version)
        ident = made.adapter
        adapter = m.Adapter(ident.name, ident.attempt, ident.version, ident.digest)
        live = [*self.run.live, ident.name]
        await self.run.publish(m.Published(adapter, made.commit_key, live, 1.0, 1.0, 1, {}))
        self.keys.append(made.commit_key)
        self.names.append(ident.name)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Link]:
        """The far end of a connection that the proxy serves as it serves any."""
        near, far, _ = unstarted_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, far)
            nursery.start_soon(_pump, near)
            yield near
            nursery.cancel_scope.cancel()

    async def _serve(self, link: Link) -> None:
        visitor = Visitor(self.proxy, link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visitor.reader.leave_when_idle)
            with suppress(LinkError):
                await link.run(visitor.serve_stream)
            self.proxy.admission.leave(link)
            nursery.cancel_scope.cancel()


async def _pump(link: Link) -> None:
    with suppress(LinkError):
        await link.run(refuse)


@pytest.fixture
def world(tmp_path: Path) -> World:
    state = Setting(path="agent.state_dir", value=str(tmp_path / "state"), origin="test")
    identity.add_run(tmp_path / "state", "demo", PUBLIC_KEY)
    (tmp_path / "bucket").mkdir()
    proxy = Proxy(parse(role="proxy", cwd=tmp_path, settings=[state]))
    return World(tmp_path, proxy, FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "demo"))


async def get(link: Link, path: str, token: str) -> tuple[int, str]:
    return await ask(link, get_request(path, token))


async def ask(link: Link, headers: Headers) -> tuple[int, str]:
    async with await link.open(headers) as stream:
        await stream.end()
        status = status_of(await stream.response())
        body = b""
        while part := await stream.receive():
            body += part
        return status, body.decode()


async def drained(stream: LinkStream) -> int:
    """How many bytes come until its end."""
    size_bytes = 0
    while part := await stream.receive():
        size_bytes += len(part)
    return size_bytes


async def shelf(link: Link, token: str) -> m.AdapterList:
    status, text = await get(link, LIST, token)
    assert status == 200, text
    return msgspec.json.decode(text, type=m.AdapterList)


# --- who ---------------------------------------------------------------------------------------


async def test_a_stranger_gets_nothing_and_is_cut_off(world: World) -> None:
    for headers in (
        get_request(LIST, "short"),
        get_request(LIST, "")[:-1],
        (*get_request(LIST, "")[:-1], (b"authorization", b"Basic " + b"x" * 43)),
    ):
        async with world.connected() as link:
            assert await ask(link, headers) == NO_TOKEN
            await wait_all_tasks_blocked()
            assert link.closed
    for path in (f"{m.ADAPTERS_PATH}/../x", f"{m.ADAPTERS_PATH}/", m.ADAPTERS_PATH):
        async with world.connected() as link:
            assert (await get(link, path, world.token()))[0] == 404
    assert world.proxy.runs == {}
    assert not (world.state / "mirror").exists()


async def test_only_a_token_of_the_run_that_has_not_ended_is_good(world: World) -> None:
    old, revoked, foreign = world.token(life_s=1.0), world.token(), world.token(run="other")
    world.revoke(revoked)
    unknown = "x" * len(old)
    for token, text in (
        (old, "the token has expired\n"),
        (revoked, "the token was revoked\n"),
        (foreign, "the token is not valid for this run\n"),
        (unknown, "the token is not valid for this run\n"),
    ):
        async with world.connected() as link:
            assert await get(link, LIST, token) == (401, text)
            await wait_all_tasks_blocked()
            assert link.closed
    assert world.proxy.runs == {}


async def test_both_roles_read_and_no_use_is_counted(world: World) -> None:
    found = [world.token("trainer"), world.token(uses=1)]
    before = tokens.tokens_file(world.state).read_bytes()
    for token in found:
        async with world.connected() as link:
            assert (await shelf(link, token)).adapters == []
            assert (await shelf(link, token)).adapters == []  # and the link stays
    assert tokens.tokens_file(world.state).read_bytes() == before


async def test_a_link_is_one_tokens_and_no_agents(world: World) -> None:
    async with world.connected() as link:
        await shelf(link, world.token())
        assert (await ask(link, CONTROL_REQUEST))[0] == 404
        answer = await get(link, LIST, world.token())
        assert answer == (401, "the connection is that of another token\n")


async def test_tokens_are_in_no_line_of_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="asyncgrpo_agent")  # `logs.set_up` has hpack say less
    await world.hold(1)
    good, bad = world.token(), world.token(run="other")
    async with world.connected() as link:
        await get(link, f"{LIST}/{world.keys[0]}", bad)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", good)) as stream,
    ):
        await stream.end()
        await drained(stream)
    assert "reader.refused" in caplog.text
    assert "adapter.lent" in caplog.text
    assert good not in caplog.text
    assert bad not in caplog.text


# --- what --------------------------------------------------------------------------------------


async def test_the_list(world: World) -> None:
    await world.hold(1)
    await world.announce(2)
    await world.run.publish(  # live from an earlier day of the proxy: only its name is known
        m.Published(m.Adapter("x", "x", 1, "x"), "x", [*world.run.live, "demo.x"], 1.0, 1.0, 1, {})
    )
    replica = world.run.fleet.join("r1", "i1", 4, 0.0)
    replica.loaded = frozenset({world.names[1]})
    async with world.connected() as link:
        found = await shelf(link, world.token())
    assert [row.adapter.name for row in found.adapters] == world.names
    assert [row.commit for row in found.adapters] == world.keys
    held, known = found.adapters
    assert held.sealed == (world.trainer.run_dir / world.keys[0]).read_bytes()
    assert (held.adapter.attempt, held.adapter.version) == (ATTEMPT, 1)
    assert known.sealed == b""
    assert found.live == [world.names[1], "demo.x"]


async def test_an_adapter_comes_as_links_carry_it(world: World) -> None:
    await world.hold(1)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream,
    ):
        await stream.end()
        envelope, rest = await read_envelope(stream, ADAPTER)
        body = rest
        while part := await stream.receive():
            body += part
    assert (envelope.adapter.name, envelope.commit) == (world.names[0], world.keys[0])
    files = sorted((world.trainer.folder / "v1").iterdir())
    sealed = (world.trainer.run_dir / world.keys[0]).read_bytes()
    assert body == sealed + b"".join(path.read_bytes() for path in files)


@pytest.mark.parametrize("key", ["x", "../../proxy/tokens.json", "commits/a0001-7f3c/000000/v9"])
async def test_no_other_key_is_served(world: World, key: str) -> None:
    await world.hold(1)
    async with world.connected() as link:
        status, text = await get(link, f"{LIST}/{key}", world.token())
    assert (status, text) == (404, "the proxy knows of no such adapter that is in use\n")


async def test_what_was_removed_from_the_disk_is_named_and_asked_for_again(world: World) -> None:
    await world.hold(1)
    store = await world.proxy.replica_door.mirrors.of(world.run).store()
    for path in store.run_dir.glob("adapters/*/*/*.safetensors"):
        path.unlink()
    async with world.connected() as link:
        status, text = await get(link, f"{LIST}/{world.keys[0]}", world.token())
    assert status == 503
    assert "the mirror cannot be used: No such file" in text
    assert world.names[0] not in store


async def test_without_the_runs_key_nothing_is_lent(world: World) -> None:
    await world.announce(1)
    (world.state / "runs" / "demo" / "run.pub").unlink()
    async with world.connected() as link:
        token = world.token()
        assert len((await shelf(link, token)).adapters) == 1
        status, text = await get(link, f"{LIST}/{world.keys[0]}", token)
    assert status == 503
    assert "run 'demo' is not known here" in text


# --- how long ----------------------------------------------------------------------------------


async def test_what_nobody_brings_is_waited_for_and_then_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_mirror, "AWAY_S", 0.05)
    monkeypatch.setattr(proxy_mirror, "LOOK_S", 0.01)
    await world.announce(1)
    async with world.connected() as link:
        status, text = await get(link, f"{LIST}/{world.keys[0]}", world.token())
    assert status == 503
    assert text == (
        f"{world.names[0]}: the proxy does not hold it, and the trainer, who could bring it, is not"
        " connected. Try again later, or take a version that it holds\n"
    )


async def test_what_leaves_the_live_window_is_not_waited_for(world: World) -> None:
    await world.announce(1)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream,
    ):
        await stream.end()
        with trio.move_on_after(0.1):  # it waits
            await stream.response()
        world.run.live.clear()
        world.run.wanted.ring()
        assert status_of(await stream.response()) == 410


async def test_a_reader_hears_that_what_it_chose_has_left(world: World) -> None:
    await world.announce(1)
    async with world.connected() as link:
        token = world.token()
        join = Join(
            addresses=(),
            ca_der=b"",
            token=token,
            role="replica",
            run="demo",
            run_public_key=PUBLIC_KEY,
        )
        source = LinkSource(link, join, await shelf(link, token))
        world.run.live.clear()
        with pytest.raises(AdapterPrunedError, match="knows of no such adapter that is in use"):
            await source.read_commit(world.keys[0], run="demo", public_key=PUBLIC_KEY)


async def test_a_trainer_is_asked_and_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    for name, seconds in (("SUPPLY_S", 0.3), ("AWAY_S", 0.1), ("LOOK_S", 0.01)):
        monkeypatch.setattr(proxy_mirror, name, seconds)
    monkeypatch.setattr(proxy_mirror, "ON_ITS_WAY_S", 0.0)
    await world.announce(1)
    here, _ = await linked_pair(nursery)  # its far end sends back what the trainer is told
    stream = await here.open(CONTROL_REQUEST)
    world.run.trainer = TrainerSeat(link=here, control=ControlChannel(stream, FROM_DIALLER))
    mirror = world.proxy.replica_door.mirrors.of(world.run)
    nursery.start_soon(mirror.ask, world.run.trainer.control)
    async with world.connected() as link:
        status, text = await get(link, f"{LIST}/{world.keys[0]}", world.token())
    assert status == 503
    assert "and the trainer has not brought it after 0.3 s" in text
    told: ControlChannel[m.Hello, m.FromAcceptor] = ControlChannel(stream, FROM_ACCEPTOR)
    assert await told.receive() == m.Supply(world.names)
    nursery.cancel_scope.cancel()


async def test_what_is_brought_meanwhile_is_lent(world: World) -> None:
    await world.announce(1)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream,
    ):
        await stream.end()
        with trio.move_on_after(0.1):  # it waits
            await stream.response()
        made = world.trainer.folder / "v1"
        mirror = world.proxy.replica_door.mirrors.of(world.run)
        store = await mirror.store()
        sealed = (world.trainer.run_dir / world.keys[0]).read_bytes()
        incoming = store.begin(world.keys[0], sealed)
        for path in sorted(made.iterdir()):
            incoming.write(path.read_bytes())
        incoming.finish()
        world.run.wanted.ring()
        assert status_of(await stream.response()) == 200


async def test_a_download_outlives_what_strangers_get_as_long_as_it_moves(
    world: World, mock_clock: MockClock
) -> None:
    await world.hold(1, LARGE)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream,
    ):
        await stream.end()
        size_bytes = 0
        while part := await stream.receive():
            size_bytes += len(part)
            if size_bytes % (1 << 20) < len(part):  # eight times or so
                mock_clock.jump(8.0)
                await wait_all_tasks_blocked()
    assert size_bytes > 8 << 20
    assert trio.current_time() > 60.0


async def test_a_download_that_stands_still_ends(world: World, mock_clock: MockClock) -> None:
    await world.hold(1, LARGE)
    async with world.connected() as link:
        async with await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream:
            await stream.end()
            await stream.response()
            # Files are read in threads, which no virtual clock waits for: it stands until nothing
            # moves, or the rule for idle links could end this one at the same moment.
            await wait_all_tasks_blocked(0.25)
            for _ in range(600):
                mock_clock.jump(1.0)
                await wait_all_tasks_blocked(0.01)
                if world.proxy.lending.downloads == 0:
                    break
            with pytest.raises(LinkError, match="was reset by the peer"):
                await drained(stream)
        assert world.proxy.lending.downloads == 0
        assert not link.closed


async def test_a_link_that_asks_for_nothing_more_is_closed(
    world: World, mock_clock: MockClock
) -> None:
    async with world.connected() as link:
        await shelf(link, world.token())
        for _ in range(35):
            mock_clock.jump(1.0)
            await wait_all_tasks_blocked()
        assert link.closed


async def test_downloads_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncgrpo_agent.roles.proxy_adapters.MAX_DOWNLOADS", 1)
    await world.hold(1, LARGE)
    request = get_request(f"{LIST}/{world.keys[0]}", world.token())
    async with world.connected() as first, world.connected() as second:
        async with await first.open(request) as stream:
            await stream.end()
            await stream.response()
            assert (await ask(second, request))[0] == 503
        await wait_all_tasks_blocked(0.05)
        async with await second.open(request) as stream:
            await stream.end()
            assert status_of(await stream.response()) == 200


async def test_a_download_ends_with_its_token(world: World, nursery: trio.Nursery) -> None:
    await world.hold(1, LARGE)
    token = world.token()
    nursery.start_soon(world.proxy.admission.watch)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", token)) as stream,
    ):
        await stream.end()
        await stream.response()
        world.revoke(token)
        with trio.fail_after(10):
            while not link.closed:  # noqa: ASYNC110 - a link has no event for its end
                await trio.sleep(0.05)
        with pytest.raises(LinkError):
            await drained(stream)
    nursery.cancel_scope.cancel()


async def test_what_is_being_read_may_be_pruned(world: World) -> None:
    await world.hold(1, LARGE)
    async with (
        world.connected() as link,
        await link.open(get_request(f"{LIST}/{world.keys[0]}", world.token())) as stream,
    ):
        await stream.end()
        await stream.response()
        await world.hold(2)
        store = await world.proxy.replica_door.mirrors.of(world.run).store()
        assert store.prune(set()) == [world.names[0]]
        assert await drained(stream) > 8 << 20
