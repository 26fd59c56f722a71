"""TRL's own rollout worker against a fleet and a proxy that have hardly any room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site

pytestmark = [pytest.mark.engine, pytest.mark.deep]
TASK = fleet.ROOT / "scripts" / "demo_task"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def test_a_full_queue_costs_time_and_no_rollout(site: Site, engine_python: str) -> None:
    proxy = site.proxy("--set=proxy.queue_limit=2")
    replica = site.replica("r0", f"--model={TASK / 'model'}", "--set=replica.capacity=2")
    trainer = site.hosts.start(
        "trainer",
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / 'trainer'}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        "--set=train.max_steps=4",
        "--set=train.per_device_train_batch_size=16",
        "--set=train.eval.samples=0",
    )
    assert trainer.process.wait(240) == 0, trainer.text()
    assert replica.process.wait(20) == 0
    assert "the queue is full: 2 rollouts of run demo wait for a replica" in proxy.text()
    assert "rollout.failed" not in trainer.text()
    history = read(site.folder / "trainer" / "trainer" / "demo" / "history.jsonl")
    steps = [record["step"] for record in history if record["kind"] == "metrics"]
    assert steps == [1, 2, 3, 4]
