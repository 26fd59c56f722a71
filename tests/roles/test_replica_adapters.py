"""The loader on a mount whose every look is counted, with a fake vLLM and no proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from msgspec import structs

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Engine
from asyncgrpo_agent.core import looks
from asyncgrpo_agent.core.adapters import COMMITS_PER_FOLDER
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.procs.vllm import EngineSpec
from asyncgrpo_agent.roles import replica_adapters
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.wire import messages as m
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer
from fakes.strict_mount import HF_LIKE, MINIMAL, Host, Preset, StrictBucket
from fakes.vllm import FakeVllm

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
FACTS = m.EngineFacts("base", "ab" * 32, "torch.float32", 512, 6, 8, "0.31.0")


@dataclass
class World:
    """A trainer and a replica, each with a mount of its own."""

    trainer: FakeTrainer
    mount: Host
    loader: Loader
    told: list[m.FromDialler] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    async def tell(self, message: m.FromDialler) -> None:
        self.told.append(message)
        self.news.set()
        self.news = trio.Event()

    async def publish(
        self, version: int, *, announced: bool, live: Sequence[str] = ()
    ) -> PublishedAdapter:
        local = self.trainer.save(version)
        written = await trio.to_thread.run_sync(lambda: self.trainer.publish(version, local))
        if announced:
            ident = written.adapter
            adapter = m.Adapter(ident.name, ident.attempt, ident.version, ident.digest)
            self.loader.announced(m.Announce(adapter, written.commit_key, [*live, ident.name]))
        return written

    async def loaded(self, written: PublishedAdapter) -> float:
        """Until the replica acks it; for how long."""
        began = trio.current_time()
        with trio.fail_after(PATIENCE_S):
            while written.adapter.name not in self._acked():
                await self.news.wait()
        return trio.current_time() - began

    def _acked(self) -> list[str]:
        return [one.adapter.name for one in self.told if isinstance(one, m.Ack) and one.ok]


async def nobody(message: m.FromDialler) -> None:
    """Who is told before there is a world."""


def loader(folder: Path, mount: Path) -> tuple[Loader, Path]:
    """A loader for a vLLM that is up, and the socket where that has to be."""
    socket = folder / "vllm.sock"
    spec = EngineSpec(
        python="",
        module="",
        model_path="",
        served_name="base",
        socket_path=str(socket),
        args=(),
        max_loras=6,
        max_lora_rank=8,
        dtype="auto",
        cpu=True,
    )
    config = Config(
        role="replica",
        agent=Agent(state_dir=str(folder / "state")),
        bucket=Bucket(path=str(mount)),
        engine=Engine(max_loras=6, max_lora_rank=8),
    )
    join = Join(
        addresses=("127.0.0.1:1",),
        ca_der=b"",
        token="",
        role="replica",
        run="run",
        run_public_key=PUBLIC_KEY,
    )
    engine = EngineHost(config, spec, FACTS.model_digest, lambda: None, facts=FACTS)
    return Loader(config, join, engine, nobody), socket


@asynccontextmanager
async def world(folder: Path, preset: Preset = MINIMAL) -> AsyncIterator[World]:
    bucket = StrictBucket(folder)
    with (
        bucket.mount("trainer", preset=preset) as writer,
        bucket.mount("replica", preset=preset, read_only=True) as reader,
    ):
        made, socket = loader(folder, reader.path)
        here = World(FakeTrainer(folder / "local", writer.path / "run"), reader, made)
        made.tell = here.tell
        async with made.engine.client, trio.open_nursery() as nursery:
            await nursery.start(FakeVllm(model="base").run, socket)
            nursery.start_soon(made.run)
            yield here
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("quantization", ["", "awq"])
async def test_adapters_are_for_this_model_or_for_what_it_was_made_of(
    tmp_path: Path, quantization: str
) -> None:
    async with world(tmp_path) as here:
        here.loader.engine.model_digest = "cd" * 32
        here.loader.engine.facts = structs.replace(FACTS, quantization=quantization)
        here.loader.accept(ATTEMPT, [])
        name = await here.publish(0, announced=True)
        if quantization:
            await here.loaded(name)
            counts = here.loader.counts
            assert counts.load_s.buckets[-1] == ("+Inf", 1.0)
            assert (counts.staged_bytes, counts.failures) == (name.total_bytes, {})
            assert here.loader.bucket.worker_starts == 1
        else:
            with trio.fail_after(10):
                while not here.loader.commits.arrivals.refused:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            assert here.loader.loaded == []


async def test_polls_are_slow_while_the_proxy_announces(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.loader.accept(ATTEMPT, [])
        await here.loaded(await here.publish(0, announced=True))
        await trio.sleep(0.5)  # for the round that follows a load
        before = here.mount.counters()
        await trio.sleep(3.0)
        assert here.mount.counters() == before
        assert await here.loaded(await here.publish(1, announced=True)) < 1.0


async def test_a_poll_costs_two_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as here:
        here.loader.accept(ATTEMPT, [])
        for version in range(5):
            await here.loaded(await here.publish(version, announced=True))
        here.loader.unlinked()
        await trio.sleep(0.5)
        before = here.mount.counters()
        await trio.sleep(3.0)
        cost = here.mount.counters().since(before)
        assert 2 <= cost.listings <= 2 * 4
        assert cost.lookups <= 4 * 4  # of the folders on the way, whatever is in the last


async def test_a_mount_that_hangs_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(replica_adapters.notifier, "status", said.append)
    async with world(tmp_path) as here:
        here.loader.bucket._silence_s = 0.5
        here.loader.accept(ATTEMPT, [])
        await here.loaded(await here.publish(0, announced=True))
        here.mount.hang("readdir")
        here.loader.unlinked()
        with trio.fail_after(PATIENCE_S):
            while not any("holds pid" in text for text in said):  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert f"mountpoint-s3 on {here.mount.path} does not answer" in said[-1]
        failed = [one for one in caplog.records if one.message == "adapters.round_failed"]
        assert str(here.mount.path) in failed[0].__dict__["agent_fields"]["hung"]
        here.mount.release()
        with trio.fail_after(PATIENCE_S):
            while said[-1] != "adapters: all is well again":  # noqa: ASYNC110
                await trio.sleep(0.05)


async def test_it_costs_no_more_while_the_live_ones_are_in_two_folders(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.loader.accept(ATTEMPT, [])
        live: list[str] = []
        for version in range(COMMITS_PER_FOLDER - 2, COMMITS_PER_FOLDER + 2):
            written = await here.publish(version, announced=True, live=live)
            live.append(written.adapter.name)
            await here.loaded(written)
        here.loader.unlinked()
        await trio.sleep(0.5)
        before = len(here.mount.calls("readdir"))
        await trio.sleep(3.0)
        keys = [call.key for call in here.mount.calls("readdir")][before:]
        polls = sum(key == f"run/commits/{ATTEMPT}" for key in keys)
        assert 2 <= polls <= 4
        assert len(keys) == 2 * polls
        await here.loader.engine.client.unload_adapter(live[0])  # as a vLLM does that restarts
        here.loader.in_use[live[0]] += 1
        here.loader.wake()
        with trio.fail_after(PATIENCE_S):
            while here._acked().count(live[0]) < 2:
                await here.news.wait()


async def test_without_a_link_the_bucket_tells(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.loader.accept(ATTEMPT, [])
        await here.loaded(await here.publish(0, announced=True))
        here.loader.unlinked()
        assert await here.loaded(await here.publish(1, announced=False)) < 3.0


async def test_what_was_announced_is_loaded_as_soon_as_it_shows(tmp_path: Path) -> None:
    late = replace(HF_LIKE, visible_after_s=1.0)
    async with world(tmp_path, late) as here:
        here.loader.accept(ATTEMPT, [])
        assert 0.5 < await here.loaded(await here.publish(0, announced=True)) < 1.8
        assert not here.loader.commits.awaited


async def test_what_never_shows_is_looked_for_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "AWAIT_SHARE", 1.0)
    async with world(tmp_path) as here:
        here.loader.accept(ATTEMPT, [])
        await here.loaded(await here.publish(0, announced=True))
        name = f"run.{ATTEMPT}.v000001.{'0' * 12}"
        adapter = m.Adapter(name, ATTEMPT, 1, "0" * 64)
        key = f"commits/{ATTEMPT}/000000/v000001.toml"
        before = here.mount.counters()
        here.loader.announced(m.Announce(adapter, key, [name]))
        await trio.sleep(3.0)
        assert 4 <= here.mount.counters().since(before).listings <= 2 * 8
        here.loader.retired([])
        await trio.sleep(0.5)
        assert not here.loader.commits.awaited
