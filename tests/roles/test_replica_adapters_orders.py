"""The loader under events in any order, with faults of bucket, engine and host.

Whatever happens: vLLM is only ever given bytes that the announced trainer committed; nothing that a
request uses is taken from it; files stay for as long as vLLM may read them; and once all is well
the newest sound adapter is served.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Engine, Replica
from asyncgrpo_agent.core.adapters import adapter_digest, commit_key, parse_attempt, parse_name
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import BucketUnavailableError, EngineError
from asyncgrpo_agent.net.engine_client import ServedModel
from asyncgrpo_agent.roles import replica_commits
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.store import bucket, retention, staging
from asyncgrpo_agent.store.bucket import ListedCommit, PublishedAdapter
from asyncgrpo_agent.store.inspection import inspect_files
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.wire import messages as m
from fakes.adapters import CONFIG, WEIGHTS
from fakes.bucket import PUBLIC_KEY, FakeTrainer

FACTS = m.EngineFacts("base", "ab" * 32, "torch.float32", 512, 3, 8, "0.31.0")
ATTEMPTS = ("a0001-aaaa", "a0002-bbbb", "a0003-cccc", "a0004-dddd")


@dataclass
class PlainBucket:
    """What a BucketHost does, without its worker: on a folder, whose trouble is told by `down`."""

    run_dir: Path
    down: bool = False
    stage_s: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PlainBucket]:
        yield self

    async def _ready(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.down:
            raise BucketUnavailableError("does not answer")

    def hung(self) -> str:
        return ""

    async def watch(self, attempt: str) -> bool:
        await self._ready()
        return False

    async def list_commits(self, attempt: str, after_version: int) -> list[str]:
        await self._ready()
        return bucket.list_commits(self.run_dir, attempt, after_version)

    async def read_commit(self, key: str, *, run: str, public_key: bytes) -> ListedCommit:
        await self._ready()
        return bucket.read_commit(self.run_dir, key, run=run, public_key=public_key)

    async def stage(self, commit: Commit, folder: Path, *, max_rank: int) -> staging.StagedAdapter:
        await self._ready()
        await trio.sleep(self.stage_s)
        return staging.stage(
            self.run_dir, commit, folder, max_rank=max_rank, wait=lambda seconds: None
        )


@dataclass
class FakeEngine:
    """vLLM's list of adapters, and an EngineHost that has a client of it."""

    loaded: dict[str, Path] = field(default_factory=dict)
    in_use: list[str] = field(default_factory=list)
    committed: dict[str, str] = field(default_factory=dict)  # name -> digest
    fail_loads: int = 0
    lies: bool = False  # it says that it has loaded what it has not
    fail_probes: int = 0
    probed: list[str] = field(default_factory=list)
    facts: m.EngineFacts | None = FACTS
    reason: str = ""
    model_digest: str = FACTS.model_digest

    @property
    def client(self) -> FakeEngine:
        return self

    async def models(self) -> list[ServedModel]:
        await trio.lowlevel.checkpoint()
        rows = [
            ServedModel(id=name, root=str(at), parent="base") for name, at in self.loaded.items()
        ]
        return [ServedModel(id="base", root="base", parent=None), *rows]

    async def load_adapter(self, name: str, path: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.fail_loads:
            self.fail_loads -= 1
            raise EngineError("out of memory", status=500)
        if self.lies:
            return
        assert name not in self.loaded
        assert len(self.loaded) < FACTS.max_loras
        assert digest_of(Path(path)) == self.committed[name]
        self.loaded[name] = Path(path)

    async def probe(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        assert name in self.loaded
        self.probed.append(name)
        if self.fail_probes:
            self.fail_probes -= 1
            raise EngineError("too slow", status=500)

    async def unload_adapter(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        assert name not in self.in_use
        del self.loaded[name]

    def check(self) -> None:
        """It may read the files of what it holds at any time."""
        for name, path in self.loaded.items():
            assert digest_of(path) == self.committed[name]


def digest_of(folder: Path) -> str:
    return adapter_digest({file.name: file.sha256 for file in inspect_files(folder)})


@dataclass
class World:
    """One run: its trainers, one after another, its bucket, and one replica's host."""

    folder: Path
    attempt: str = ATTEMPTS[0]
    versions: int = 0
    live: list[str] = field(default_factory=list)
    sound: list[PublishedAdapter] = field(default_factory=list)
    told: list[m.FromDialler] = field(default_factory=list)
    engine: FakeEngine = field(default_factory=FakeEngine)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    warm_up: bool = False

    def __post_init__(self) -> None:
        (self.folder / "bucket").mkdir()
        self.run_dir = self.folder / "bucket" / "run"
        self.bucket = PlainBucket(self.run_dir)

    async def tell(self, message: m.FromDialler) -> None:
        if isinstance(message, m.Ack) and message.ok:
            assert message.adapter.name in self.engine.loaded
            assert self.engine.committed[message.adapter.name] == message.adapter.digest
        self.told.append(message)

    def start(self, nursery: trio.Nursery) -> None:
        """The replica's agent, with what an earlier one has left on its disk."""
        config = Config(
            role="replica",
            agent=Agent(state_dir=str(self.folder / "state")),
            bucket=Bucket(path=str(self.folder / "bucket")),
            engine=Engine(max_loras=FACTS.max_loras, max_lora_rank=8),
            replica=Replica(warm_up=self.warm_up),
        )
        join = Join(
            addresses=(), ca_der=b"", token="", role="replica", run="run", run_public_key=PUBLIC_KEY
        )
        self.loader = Loader(config, join, cast("EngineHost", self.engine), self.tell)
        self.loader.bucket = cast("BucketHost", self.bucket)
        self.scope = trio.CancelScope()
        nursery.start_soon(self._run, self.loader, self.scope)

    async def _run(self, loader: Loader, scope: trio.CancelScope) -> None:
        with scope:
            await loader.run()

    def publish(self, attempt: str = "") -> PublishedAdapter:
        trainer = FakeTrainer(self.folder / "local", self.run_dir, attempt or self.attempt)
        self.versions += 1
        written = trainer.publish(self.versions, trainer.save(self.versions, hidden=8))
        self.engine.committed[written.adapter.name] = written.adapter.digest
        return written

    def announce(self, written: PublishedAdapter, live: list[str]) -> None:
        ident = written.adapter
        adapter = m.Adapter(ident.name, ident.attempt, ident.version, ident.digest)
        self.loader.announced(m.Announce(adapter, written.commit_key, list(live)))

    def oldest_live(self) -> int:
        """Nobody asks for what is older."""
        return min((p.version for name in self.live if (p := parse_name(name))), default=0)

    def newest(self) -> PublishedAdapter | None:
        ours = [one for one in self.sound if one.adapter.attempt == self.attempt]
        return ours[-1] if ours else None


Event = Callable[[World, trio.Nursery, int], Awaitable[None]]


async def publish(world: World, _: trio.Nursery, n: int) -> None:
    written = world.publish()
    world.sound.append(written)
    world.live.append(written.adapter.name)
    if n % 3:
        world.announce(written, world.live)


async def publish_damaged(world: World, _: trio.Nursery, n: int) -> None:
    """Its bytes are others, or fewer, or one of them is missing; late data comes later."""
    written = world.publish()
    name = (CONFIG, WEIGHTS)[n % 2]
    path = world.run_dir / "adapters" / world.attempt / f"v{world.versions:06d}" / name
    whole = path.read_bytes()
    if n < 2:
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    elif n < 4:
        path.write_bytes(whole[:-1])
    else:
        path.unlink()
    world.live.append(written.adapter.name)
    world.announce(written, world.live)


async def replay(world: World, _: trio.Nursery, n: int) -> None:
    """Somebody copies an old commit to a newer name, and a cut one, and one of another run."""
    if world.sound:
        commit = world.sound[0].sealed
        for version, data in ((50 + n, commit), (60 + n, commit[:-9]), (70 + n, b"")):
            path = world.run_dir / commit_key(world.attempt, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        world.loader.wake()


async def zombie(world: World, _: trio.Nursery, n: int) -> None:
    """A trainer of an older attempt still publishes, and reaches the replica."""
    older = [a for a in ATTEMPTS if a < world.attempt]
    if older:
        written = world.publish(older[n % len(older)])
        del world.engine.committed[written.adapter.name]  # nothing may load it
        world.announce(written, [written.adapter.name])


async def resume(world: World, _: trio.Nursery, n: int) -> None:
    later = [a for a in ATTEMPTS if a > world.attempt]
    if later:
        world.attempt = later[0]
        world.live.clear()
        world.loader.accept(world.attempt, [])


async def retire(world: World, _: trio.Nursery, n: int) -> None:
    del world.live[: min(1 + n % 2, len(world.live) - 1)]
    world.loader.retired(list(world.live))


async def prune(world: World, _: trio.Nursery, n: int) -> None:
    """All that is not live and not the newest, as the trainer does, at the worst moment."""
    listing = Listing(world.run_dir)
    newest = world.newest()
    kept = {parts.version for name in world.live if (parts := parse_name(name))}
    for version in retention.list_versions(listing).get(world.attempt, []):
        if newest is not None and version < newest.adapter.version and version not in kept:
            retention.prune(listing, world.attempt, version)


async def begin(world: World, _: trio.Nursery, n: int) -> None:
    names = sorted(world.engine.loaded)
    if names:
        world.engine.in_use.append(names[n % len(names)])
        world.loader.in_use[names[n % len(names)]] += 1


async def end(world: World, _: trio.Nursery, n: int) -> None:
    if world.engine.in_use:
        world.loader.released(world.engine.in_use.pop(n % len(world.engine.in_use)))


async def ask(world: World, _: trio.Nursery, n: int) -> None:
    """A rollout in the proxy waits for an older one that is live."""
    ours = [one for one in world.sound if one.adapter.name in world.live]
    if ours:
        world.announce(ours[n % len(ours)], world.live)


async def bucket_goes(world: World, _: trio.Nursery, n: int) -> None:
    world.bucket.down = True


async def bucket_comes(world: World, _: trio.Nursery, n: int) -> None:
    world.bucket.down = False


async def loads_fail(world: World, _: trio.Nursery, n: int) -> None:
    world.engine.fail_loads = n


async def vllm_restarts(world: World, _: trio.Nursery, n: int) -> None:
    for name in world.engine.in_use:  # vLLM takes them along
        world.loader.released(name)
    world.engine.in_use.clear()
    world.engine.loaded.clear()
    world.engine.facts = None
    world.loader.engine_changed()
    await trio.sleep(n)
    world.engine.facts = FACTS
    world.loader.engine_changed()


async def agent_restarts(world: World, nursery: trio.Nursery, n: int) -> None:
    world.scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    world.engine.in_use.clear()
    world.engine.loaded.clear()
    world.start(nursery)
    world.loader.accept(world.attempt, list(world.live) if n % 2 else [])


async def link(world: World, _: trio.Nursery, n: int) -> None:
    world.loader.unlinked()
    await trio.sleep(n)
    world.loader.accept(world.attempt, list(world.live))


async def time_passes(world: World, _: trio.Nursery, n: int) -> None:
    await trio.sleep((0.0, 0.2, 1.0, 5.0, 20.0, 120.0)[n])


EVENTS: list[Event] = [
    publish, publish, publish, time_passes, time_passes, time_passes, begin, begin, end, ask,
    retire, prune, publish_damaged, replay, zombie, resume, bucket_goes, bucket_comes, loads_fail,
    vllm_restarts, agent_restarts, link,
]  # fmt: skip


async def scenario(folder: Path, events: list[tuple[Event, int]]) -> None:
    world = World(folder)
    async with trio.open_nursery() as nursery:
        world.start(nursery)
        world.loader.accept(world.attempt, [])
        for event, n in events:
            await event(world, nursery, n)
            world.engine.check()
        world.bucket.down, world.engine.fail_loads = False, 0
        while world.engine.in_use:
            world.loader.released(world.engine.in_use.pop())
        await trio.sleep(300.0)  # what was put off is due
        world.engine.check()
        newest = world.newest()
        if newest is not None and newest.adapter.version >= world.oldest_live():
            assert newest.adapter.name in world.engine.loaded
            mark = (parse_attempt(world.attempt).number, newest.adapter.version)
            assert world.loader.high_water.value == mark
        nursery.cancel_scope.cancel()


async def at_once(function: Callable[..., object], *arguments: object) -> object:
    """In place of a thread, which a clock that jumps would not wait for."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=5, max_size=40))
def test_any_order_of_events_converges_and_breaks_nothing(
    events: list[tuple[Event, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(trio.to_thread, "run_sync", at_once)
        patched.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
        trio.run(scenario, Path(folder), events, clock=MockClock(autojump_threshold=0))


# --- single faults ---------------------------------------------------------------------------


@asynccontextmanager
async def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, warm_up: bool = False
) -> AsyncIterator[World]:
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    world = World(folder, warm_up=warm_up)
    async with trio.open_nursery() as nursery:
        world.start(nursery)
        world.loader.accept(world.attempt, [])
        yield world
        nursery.cancel_scope.cancel()


async def test_a_restarted_vllm_gets_its_adapters_while_the_bucket_is_away(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path, monkeypatch) as world:
        written = world.publish()
        world.announce(written, [written.adapter.name])
        await trio.sleep(1.0)
        world.bucket.down = True
        world.engine.facts = None
        world.engine.loaded.clear()
        world.loader.engine_changed()
        await trio.sleep(1.0)
        world.engine.facts = FACTS
        world.loader.engine_changed()
        await trio.sleep(3600.0)
        assert list(world.engine.loaded) == [written.adapter.name]
        assert caplog.text.count("adapters.round_failed") == 1
        world.bucket.down = False
        await trio.sleep(5.0)
        assert caplog.text.count("adapters.round_succeeded") == 1


async def test_a_version_that_was_pruned_on_the_way_is_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path, monkeypatch) as world:
        first, second = world.publish(), world.publish()
        real = world.bucket.stage

        async def stage(commit: Commit, folder: Path, *, max_rank: int) -> staging.StagedAdapter:
            retention.prune(Listing(world.run_dir), world.attempt, 1)
            return await real(commit, folder, max_rank=max_rank)

        monkeypatch.setattr(world.bucket, "stage", stage)
        world.announce(first, [first.adapter.name, second.adapter.name])
        await trio.sleep(60.0)
        assert list(world.engine.loaded) == [second.adapter.name]
        assert [one.adapter.version for one in world.told if isinstance(one, m.Ack)] == [2]
        assert "adapter.pruned" in caplog.text
        assert not [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]


async def test_bytes_that_come_late_are_waited_for_and_those_that_stay_wrong_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(tmp_path, monkeypatch) as world:
        written = world.publish()
        path = world.run_dir / "adapters" / world.attempt / "v000001" / WEIGHTS
        whole = path.read_bytes()
        path.write_bytes(whole[:-100])
        world.announce(written, [written.adapter.name])
        await trio.sleep(10.0)
        (refusal,) = [one for one in world.told if isinstance(one, m.Ack)]
        assert "bytes of its commit" in refusal.reason
        path.write_bytes(whole)
        await trio.sleep(10.0)
        assert list(world.engine.loaded) == [written.adapter.name]

        corrupt = world.publish()
        path = world.run_dir / "adapters" / world.attempt / "v000002" / WEIGHTS
        path.write_bytes(b"x" + whole[1:])
        world.announce(corrupt, [written.adapter.name, corrupt.adapter.name])
        await trio.sleep(30.0)
        assert "adapter.refused" not in caplog.text
        await trio.sleep(60.0)
        assert caplog.text.count("adapter.refused") == 1
        assert list(world.engine.loaded) == [written.adapter.name]


async def test_a_long_run_leaves_little_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(tmp_path, monkeypatch) as world:
        for version in range(1, 201):
            written = world.publish()
            world.live = [*world.live, written.adapter.name][-3:]
            if version % 7 == 0:
                world.engine.fail_loads = 1
            world.announce(written, world.live)
            if version % 5:  # else it is superseded before anybody looks
                await trio.sleep(2.0)
        world.told.clear()
        await trio.sleep(60.0)
        loader = world.loader
        assert written.adapter.name in world.engine.loaded
        assert len(staging.staged(loader.staging_folder)) <= 6
        kept = [
            *(loader._asked, loader._on_disk, loader._staged, loader._unloaded, loader._given),
            *(loader._unloaded_now, loader.commits.awaited, loader._arrivals._retries),
            *(loader._arrivals._noticed_at, loader._arrivals._since_s, loader._arrivals.refused),
        ]
        assert max(len(one) for one in kept) <= 8
        assert len(loader.commits.known) <= replica_commits.KEPT_COMMITS


async def test_a_vllm_that_lies_and_forgets_leaves_little_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What it never listed, and what it lost by itself, goes as what was unloaded does."""
    async with running(tmp_path, monkeypatch) as world:
        most_staged = 0
        for version in range(1, 61):
            world.engine.lies = 10 <= version < 30
            if version > 30 and version % 5 == 0:
                world.engine.loaded.clear()
            written = world.publish()
            world.live = [*world.live, written.adapter.name][-3:]
            world.announce(written, world.live)
            await trio.sleep(2.0)
            world.engine.check()
            most_staged = max(most_staged, len(staging.staged(world.loader.staging_folder)))
            if version == 29:
                assert most_staged >= 20  # as long as nothing has been loaded, nothing is removed
                most_staged = 0
        assert written.adapter.name in world.engine.loaded
        assert len(staging.staged(world.loader.staging_folder)) <= 8
        assert most_staged <= 30


async def test_a_slot_that_becomes_free_goes_to_the_newest_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with running(tmp_path, monkeypatch) as world:
        names = []
        for _ in range(FACTS.max_loras):
            written = world.publish()
            names.append(written.adapter.name)
            world.announce(written, names)
            await trio.sleep(1.0)
            world.loader.in_use[names[-1]] += 1
        written = world.publish()
        world.announce(written, [*names, written.adapter.name])
        await trio.sleep(50.0)
        assert sorted(world.engine.loaded) == names
        world.loader.released(names[0])
        await trio.sleep(0.1)
        assert sorted(world.engine.loaded) == [*names[1:], written.adapter.name]


async def test_a_host_slower_than_the_trainer_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Whenever it has copied one there is a newer one."""
    async with running(tmp_path, monkeypatch) as world:
        world.bucket.stage_s = 3.0
        behind = most_staged = 0
        for version in range(1, 101):
            written = world.publish()
            world.live = [*world.live, written.adapter.name][-6:]
            world.announce(written, world.live)
            await trio.sleep(2.0)
            world.engine.check()
            held = [p.version for n in world.engine.loaded if (p := parse_name(n))]
            behind = max(behind, version - max(held, default=0))
            most_staged = max(most_staged, len(staging.staged(world.loader.staging_folder)))
        assert behind <= 4
        assert most_staged <= 8


async def test_a_warm_up_comes_before_the_ack_and_its_failure_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(tmp_path, monkeypatch, warm_up=True) as world:
        world.engine.fail_probes = 1
        for acked in (1, 2):
            written = world.publish()
            world.announce(written, [written.adapter.name])
            await trio.sleep(1.0)
            assert world.engine.probed[-1] == written.adapter.name
            assert [one.ok for one in world.told if isinstance(one, m.Ack)] == [True] * acked
        assert caplog.text.count("adapter.cold") == 1
        assert len(world.engine.probed) == 2
