"""A replica tells whether its adapters change anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.roles.replica_effect import VERSIONS, EffectWatch
from fakes.adapters import silence, write_adapter
from fakes.vllm import FakeVllm


def name_of(version: int, attempt: int = 1) -> str:
    return f"demo.a{attempt:04d}-56f0.v{version:06d}.{version:012x}"


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def client(
    fake: FakeVllm, tmp_path: Path, nursery: trio.Nursery
) -> AsyncIterator[EngineClient]:
    path = str(tmp_path / "vllm.sock")
    await nursery.start(fake.run, path)
    async with EngineClient(path) as client:
        yield client


async def test_one_that_changes_nothing_is_told_from_one_that_does(
    fake: FakeVllm, client: EngineClient, tmp_path: Path
) -> None:
    loaded: list[str] = []
    watch = EffectWatch(client, fake.model, lambda: loaded)

    async def load(version: int, *, has_effect: bool, attempt: int = 1) -> None:
        name = name_of(version, attempt)
        folder = write_adapter(tmp_path / name, seed=version)
        if not has_effect:
            silence(folder)
        await client.load_adapter(name, str(folder))
        loaded.append(name)
        await watch.look()

    await watch.look()
    await load(VERSIONS - 2, has_effect=True)
    assert (watch.effect, watch.version) == (-1.0, -1)  # too early to tell
    await load(VERSIONS - 1, has_effect=True)
    assert watch.effect > 0
    assert watch.version == VERSIONS - 1
    await load(2 * VERSIONS - 1, has_effect=False)
    assert (watch.effect, watch.version) == (0.0, 2 * VERSIONS - 1)
    await client.unload_adapter(loaded.pop())
    loaded.append(name_of(4 * VERSIONS))  # vLLM has lost it
    await watch.look()
    assert watch.version == 2 * VERSIONS - 1
    loaded.clear()
    await watch.look()
    assert (watch.effect, watch.version) == (-1.0, -1)
