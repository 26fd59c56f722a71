from __future__ import annotations

from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Engine
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.procs.vllm import EngineSpec
from asyncgrpo_agent.roles import replica_engine_watch
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_effect import EffectWatch
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.roles.replica_engine_watch import EngineWatch
from asyncgrpo_agent.wire import messages as m
from fakes.bucket import PUBLIC_KEY
from fakes.vllm import FakeVllm

FACTS = m.EngineFacts("base", "ab" * 32, "torch.float32", 512, 6, 8, "0.31.0")


def watch_in(folder: Path, told: list[m.FromDialler], news: trio.Event) -> EngineWatch:
    async def tell(message: m.FromDialler) -> None:
        told.append(message)
        news.set()

    spec = EngineSpec(
        python="",
        module="",
        model_path="",
        served_name="base",
        socket_path=str(folder / "vllm.sock"),
        args=(),
        max_loras=6,
        max_lora_rank=8,
        dtype="auto",
        cpu=True,
    )
    config = Config(
        role="replica",
        agent=Agent(state_dir=str(folder / "state")),
        bucket=Bucket(path=str(folder / "bucket")),
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
    loader = Loader(config, join, engine, tell)
    effect = EffectWatch(engine.client, "base", lambda: loader.loaded)
    return EngineWatch(engine, loader, effect, tell)


async def test_counters_are_kept_and_told_and_gone_with_the_engine(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_engine_watch, "PROGRESS_EVERY_S", 0.01)
    told: list[m.FromDialler] = []
    news = trio.Event()
    watch = watch_in(tmp_path, told, news)
    async with watch.engine.client:
        await nursery.start(FakeVllm(model="base").run, tmp_path / "vllm.sock")
        await watch.engine.client.probe("base")
        nursery.start_soon(watch.run)
        with trio.fail_after(10):
            await news.wait()
            progress = told[0]
            assert isinstance(progress, m.Progress)
            assert watch.counters is not None
            assert progress.generated_tokens == watch.counters.generated_tokens > 0
            assert progress.paused_s == watch.paused_s == 0.0
            watch.engine.facts = None
            while watch.counters is not None:  # noqa: ASYNC110
                await trio.sleep(0.01)
