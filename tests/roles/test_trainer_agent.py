"""When a trainer takes TRL for stalled, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Agent, Config, Trainer
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import ChildNotReadyError
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.exposition import expose
from asyncgrpo_agent.roles.trainer_agent import TrainerAgent
from asyncgrpo_agent.roles.trainer_metrics import TrainerView
from asyncgrpo_agent.store.history import History
from asyncgrpo_agent.wire import messages as m
from fakes.bucket import PRIVATE_KEY, PUBLIC_KEY
from fakes.scraped import Series, series_in, value

STALL_S = 60.0


@dataclass
class World:
    agent: TrainerAgent
    stalled_at: float = 0.0

    async def watch(self) -> None:
        with pytest.raises(ChildNotReadyError, match="no training step for 6"):
            await self.agent.stall.watch()
        self.stalled_at = trio.current_time()


def world(folder: Path) -> World:
    join = Join(
        addresses=("127.0.0.1:1",),
        ca_der=b"",
        token="",
        role="trainer",
        run="run",
        run_public_key=PUBLIC_KEY,
        run_private_key=PRIVATE_KEY,
    )
    config = Config(
        role="trainer", agent=Agent(state_dir=str(folder)), trainer=Trainer(stall_s=STALL_S)
    )
    bucket = BucketHost(str(folder), "run", config.agent)
    agent = TrainerAgent(config, join, "ab" * 32, History(folder / "h.jsonl"), bucket)
    agent.stall.heard()
    return World(agent)


async def test_waiting_for_replicas_or_the_bucket_is_no_stall(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    made, began = world(tmp_path), trio.current_time()
    with made.agent.history:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.watch)
            await trio.sleep(1000.0)  # nobody can answer rollouts
            made.agent._on_message(
                m.Fleet(ready=1, registered=1, capacity=8, engine=None, replicas=[])
            )
            made.agent.adapters._unwritten = 1
            await trio.sleep(1000.0)  # TRL waits in a load call
            made.agent.adapters._unwritten = 0
    assert abs(made.stalled_at - began - 2000.0 - STALL_S) < 10.0  # it looks every 5 s


async def test_it_counts_on_over_the_starts_of_trl(tmp_path: Path) -> None:
    view = TrainerView("run")

    def scraped() -> Series:
        return series_in(expose(view.source.samples())[1])

    for start in (1, 2):
        agent = world(tmp_path).agent
        with agent.history, view.showing(agent):
            agent.record("sync", bytes=100, seconds=2.0, report=None)
            agent.observe({"kind": "metrics", "step": 7, "max_steps": 9, "values": {"reward": 0.5}})
            agent.link.resent = 3
            assert value(scraped(), "asyncgrpo_trainer_step", run="run") == 7
            assert value(scraped(), "asyncgrpo_trainer_sync_bytes_total", run="run") == start * 100
            assert "there is no link to the proxy" in view.source.reasons()
        assert value(scraped(), "asyncgrpo_trainer_rollouts_resent_total", run="run") == start * 3
    assert value(scraped(), "asyncgrpo_trainer_reward", run="run") == 0.5
    assert ("asyncgrpo_trainer_step", frozenset({("run", "run")})) not in scraped()
