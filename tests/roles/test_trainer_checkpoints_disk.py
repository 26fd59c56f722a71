"""Real TRL on a disk that is too small for its checkpoints; engines are fakes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site

pytestmark = [
    pytest.mark.engine,
    pytest.mark.deep,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system"),
]

TASK = fleet.ROOT / "scripts" / "demo_task"
DISK = "12m"  # room for a few checkpoints, of some MB each


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.proxy()
        made.replica("r0", f"--model={TASK / 'model'}")
        yield made


def start(site: Site, host: str, engine_python: str, *, steps: int, small: bool) -> fleet.Agent:
    output = site.folder / f"{host}-output"
    output.mkdir()
    mount = f'mount -t tmpfs -o size={DISK} none {output} && exec "$@"'
    return site.hosts.start(
        host,
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / host}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        f"--set=train.output_dir={output}",
        f"--set=train.max_steps={steps}",
        "--set=train.per_device_train_batch_size=8",
        "--set=train.eval.samples=0",
        "--set=train.save_strategy=steps",
        "--set=train.save_steps=2",
        "--set=trainer.restarts=0",
        within=("unshare", "--mount", "sh", "-c", mount, "sh") if small else (),
    )


def records(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


def test_a_disk_that_gets_full_costs_nothing_that_was_committed(
    site: Site, engine_python: str
) -> None:
    first = start(site, "one", engine_python, steps=1000, small=True)
    assert first.process.wait(120) == 1
    (error,) = records(site, "one", "error")
    assert error["what"] == "the disk is full"
    assert f"train.output_dir {site.folder}/one-output/demo" in error["where"]
    assert "save_total_limit keeps less" in error["fix"]
    assert "the disk is full" in first.text()

    mirrored = max(record["step"] for record in records(site, "one", "checkpoint"))
    second = start(site, "two", engine_python, steps=mirrored + 3, small=False)
    assert second.process.wait(120) == 0, second.text()
    (resumed,) = records(site, "two", "resumed")
    assert (resumed["step"], resumed["source"]) == (mirrored, "bucket")
    folder = site.folder / "two-output" / "demo" / f"checkpoint-{mirrored + 3}"
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == mirrored + 3
