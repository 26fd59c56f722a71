"""Real TRL's trainer is killed ten times over one run, each time with its host; engines are fakes.

The engines compare the bytes of every adapter with the name under which they serve it, and answer
better with each version. So rewards tell which versions the run was trained on.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncgrpo_agent.core.adapters import parse_attempt, parse_name
from asyncgrpo_agent.store.history import read
from fakes import fleet, witness
from fakes.fleet import Site
from fakes.processes import children_naming, runs

pytestmark = [pytest.mark.engine, pytest.mark.deep]

TASK = fleet.ROOT / "scripts" / "demo_task"
KILLS = 10
STEPS = 90
SAVE_STEPS = 3
MOST_S = 8.0  # of training, before a kill
SEED = 6
NOISE = 0.1  # of a mean reward over a third of the run: about 500 answers
REWARD = f"""
def is_right(completion_ids, **columns):
    return [float(ids[0] == {witness.RIGHT}) for ids in completion_ids]
"""


@contextmanager
def run_of(folder: Path) -> Iterator[Site]:
    """A proxy and two replicas."""
    folder.mkdir()
    (folder / "first_token.py").write_text(REWARD)
    with fleet.site(folder) as site:
        site.proxy()
        for name in ("r0", "r1"):
            site.replica(
                name,
                f"--model={TASK / 'model'}",
                "--set=engine.module=fakes.witness",
                "--",
                f"--fake-record={folder / name}.jsonl",
                "--fake-tokens-per-s=10",
            )
        yield site


def start(site: Site, host: str, engine_python: str) -> fleet.Agent:
    """On a host that has nothing of the run."""
    return site.hosts.start(
        host,
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / host}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        "--min-replicas=2",
        f"--set=train.max_steps={STEPS}",
        '--set=train.rewards=["first_token:is_right"]',
        f"--set=train.python_path={json.dumps([str(site.folder)])}",
        "--set=train.per_device_train_batch_size=16",
        "--set=train.max_inflight_tasks=32",
        "--set=train.eval.samples=0",
        "--set=train.save_strategy=steps",
        f"--set=train.save_steps={SAVE_STEPS}",
    )


def records(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


def newest_in_bucket(site: Site) -> int:
    """The step of the last checkpoint that was committed; 0 without any."""
    manifests = (site.folder / "bucket" / "demo" / "checkpoints").rglob("s*.toml")
    return max((int(path.stem.removeprefix("s")) for path in manifests), default=0)


def kill_at_random(site: Site, random: Random, number: int, engine_python: str) -> str:
    """One host, until it is gone: most die while TRL trains, some while it still starts."""
    host = f"host{number}"
    trainer = start(site, host, engine_python)
    if number % 4 == 3:
        wait_s = random.uniform(0.0, 10.0)
    else:
        trainer.wait_for("phase=training", patience_s=120)
        log = site.folder / host / "trainer" / "demo" / "train.log"
        # TRL says that it trains before its rollout process has loaded.
        fleet.Agent("TRL", trainer.process, log).wait_for(r"step \d+/", patience_s=120)
        wait_s = random.uniform(0.0, MOST_S)
    time.sleep(wait_s)  # noqa: TID251 - the moment is the point
    assert trainer.process.poll() is None, trainer.text()
    workers = children_naming(trainer.process.pid, "mount-worker")
    trainer.end(signal.SIGKILL)
    wait_for_end(workers)
    return host


def wait_for_end(workers: list[int]) -> None:
    """Those that touch the bucket may be in the middle of a file; then nothing there changes."""
    deadline = time.monotonic() + fleet.PATIENCE_S
    while any(runs(pid) for pid in workers):
        assert time.monotonic() < deadline, workers
        time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock


def rewards(site: Site, hosts: list[str]) -> dict[int, float]:
    """By step, as the run went on: a step that was lost gives way to its successor."""
    found = {}
    for host in hosts:
        for record in records(site, host, "metrics"):
            found[record["step"]] = record["values"]["reward"]
    return found


def thirds(found: dict[int, float]) -> list[float]:
    size = STEPS // 3
    ordered = [found[step] for step in sorted(found)]
    return [statistics.mean(ordered[begin : begin + size]) for begin in range(0, STEPS, size)]


def check_engines(site: Site) -> None:
    """Right bytes under each name, no error, and never an older attempt's once a newer one came."""
    for name in ("r0", "r1"):
        file = site.folder / f"{name}.jsonl"
        loads = list(witness.read(file, "load"))
        assert loads
        assert all(load["is_right"] for load in loads)
        assert list(witness.read(file, "error")) == []
        asked = {completion["name"] for completion in witness.read(file, "completion")}
        assert asked <= {load["name"] for load in loads}
        parts = [parse_name(load["name"]) for load in loads]
        attempts = [parse_attempt(part.attempt).number for part in parts if part]
        assert attempts == sorted(attempts)
        text = (site.folder / f"{name}-0.out").read_text()
        assert text.count("child.started child=vllm") == 1


def test_ten_kills_cost_only_what_no_checkpoint_held(tmp_path: Path, engine_python: str) -> None:
    with run_of(tmp_path / "undisturbed") as site:
        assert start(site, "host0", engine_python).process.wait(240) == 0
        undisturbed = rewards(site, ["host0"])
        check_engines(site)

    random = Random(SEED)
    with run_of(tmp_path / "killed") as site:
        hosts, committed = [], []
        for number in range(KILLS):
            committed.append(newest_in_bucket(site))
            hosts.append(kill_at_random(site, random, number, engine_python))
        committed.append(newest_in_bucket(site))
        last = start(site, "last", engine_python)
        assert last.process.wait(240) == 0, last.text()
        hosts.append("last")
        killed = rewards(site, hosts)
        check_engines(site)

        assert len(set(committed)) > KILLS // 2, committed  # or the kills came too early to cost
        for host, step in zip(hosts, committed, strict=True):
            resumed = [record["step"] for record in records(site, host, "resumed")]
            assert resumed in ([step] if step else [], []), host
            trained = [record["step"] for record in records(site, host, "metrics")]
            assert trained == list(range(step + 1, step + 1 + len(trained))), host
        state = site.folder / "last" / "output" / "demo" / f"checkpoint-{STEPS}"
        assert json.loads((state / "trainer_state.json").read_text())["global_step"] == STEPS

    sys.stdout.write(f"began at {committed}; thirds {thirds(killed)}, {thirds(undisturbed)}\n")
    assert sorted(killed) == sorted(undisturbed) == list(range(1, STEPS + 1))
    for one, other in zip(thirds(killed), thirds(undisturbed), strict=True):
        assert one == pytest.approx(other, abs=NOISE)
