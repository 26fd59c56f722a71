"""Real TRL's trainer is killed again and again over one run, each time with its host.

Engines that are fakes answer better with each version, so that rewards tell which versions the run
was trained on; with the real vLLM the model learns to add. Either writes down the bytes that it has
loaded under each name.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
SAVE_STEPS = 3
NOISE = 0.1  # of a mean reward over a third of the run with fakes: about 500 answers
SEED = 6
REWARD = f"""
def is_right(completion_ids, **columns):
    return [float(ids[0] == {witness.RIGHT}) for ids in completion_ids]
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Of engines, and how long a run is with them."""

    replicas: tuple[str, ...]
    kills: int
    steps: int
    most_s: float  # of training, before a kill
    reward: str
    batch: int
    is_real: bool = False


FAKE = Kind(
    replicas=("r0", "r1"),
    kills=10,
    steps=90,
    most_s=8.0,
    reward="first_token:is_right",
    batch=16,
)
REAL = Kind(
    replicas=("r0",),
    kills=6,
    steps=45,
    most_s=8.0,
    reward="rewards:exact_answer",
    batch=32,
    is_real=True,
)


@contextmanager
def run_of(folder: Path, kind: Kind, engine_python: str) -> Iterator[Site]:
    """A proxy and its replicas."""
    folder.mkdir()
    (folder / "first_token.py").write_text(REWARD)
    with fleet.site(folder) as site:
        site.proxy()
        for name in kind.replicas:
            record = folder / f"{name}.jsonl"
            if kind.is_real:
                real_replica(site, name, record, engine_python)
            else:
                site.replica(
                    name,
                    f"--model={TASK / 'model'}",
                    "--set=engine.module=fakes.witness",
                    "--",
                    f"--fake-record={record}",
                    "--fake-tokens-per-s=10",
                )
        yield site


def real_replica(site: Site, name: str, record: Path, engine_python: str) -> None:
    alone = site.folder / "middleware"  # beside it there is a module that is called vllm, too
    alone.mkdir(exist_ok=True)
    shutil.copy(fleet.ROOT / "tests" / "fakes" / "witness_vllm.py", alone)
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(alone),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "WITNESS_RECORD": str(record),
    }
    site.hosts.start(
        name,
        "--role=replica",
        "--join=replica.join",
        f"--name={name}",
        f"--state-dir={site.folder / name}",
        f"--model={TASK / 'model'}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        "--set=engine.dtype=float32",
        "--set=engine.max_lora_rank=8",
        *(f"--set=engine.env.{key}={value}" for key, value in environment.items()),
        *("--", "--max-model-len=128", "--middleware=witness_vllm.record"),
    )


def start(site: Site, kind: Kind, host: str, engine_python: str) -> fleet.Agent:
    """On a host that has nothing of the run."""
    return site.hosts.start(
        host,
        "--role=trainer",
        f"--config={TASK / 'demo.toml'}",
        "--join=trainer.join",
        f"--state-dir={site.folder / host}",
        f"--bucket={site.folder / 'bucket'}",
        f"--engine-python={engine_python}",
        f"--min-replicas={len(kind.replicas)}",
        f"--set=train.max_steps={kind.steps}",
        f'--set=train.rewards=["{kind.reward}"]',
        f"--set=train.python_path={json.dumps([str(site.folder), str(TASK)])}",
        f"--set=train.per_device_train_batch_size={kind.batch}",
        f"--set=train.max_inflight_tasks={2 * kind.batch}",
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


def kill_at_random(site: Site, kind: Kind, random: Random, number: int, engine_python: str) -> str:
    """One host, until it is gone: most die while TRL trains, some while it still starts."""
    host = f"host{number}"
    trainer = start(site, kind, host, engine_python)
    if number % 4 == 3:
        wait_s = random.uniform(0.0, 10.0)
    else:
        trainer.wait_for("phase=training", patience_s=240)
        log = site.folder / host / "trainer" / "demo" / "train.log"
        # TRL says that it trains before its rollout process has loaded.
        fleet.Agent("TRL", trainer.process, log).wait_for(r"step \d+/", patience_s=240)
        wait_s = random.uniform(0.0, kind.most_s)
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
    size = len(found) // 3
    ordered = [found[step] for step in sorted(found)]
    return [statistics.mean(ordered[at : at + size]) for at in range(0, 3 * size, size)]


def check_engines(site: Site, kind: Kind) -> None:
    """Right bytes under each name, no error, and never an older attempt's once a newer one came."""
    for name in kind.replicas:
        file = site.folder / f"{name}.jsonl"
        loads = list(witness.read(file, "load"))
        assert loads
        assert all(map(witness.is_right, loads))
        assert list(witness.read(file, "error")) == []
        asked = {completion["name"] for completion in witness.read(file, "completion")}
        assert asked <= {load["name"] for load in loads}
        parts = [parse_name(load["name"]) for load in loads]
        attempts = [parse_attempt(part.attempt).number for part in parts if part]
        assert attempts == sorted(attempts)
        text = (site.folder / f"{name}-0.out").read_text()
        assert text.count("child.started child=vllm") == 1


def killed_run(site: Site, kind: Kind, engine_python: str) -> dict[int, float]:
    """Rewards by step of a run whose trainer is killed again and again, and then left alone."""
    random, hosts, committed = Random(SEED), [], []
    for number in range(kind.kills):
        committed.append(newest_in_bucket(site))
        hosts.append(kill_at_random(site, kind, random, number, engine_python))
    committed.append(newest_in_bucket(site))
    last = start(site, kind, "last", engine_python)
    assert last.process.wait(400) == 0, last.text()
    hosts.append("last")
    check_engines(site, kind)

    assert len(set(committed)) > kind.kills // 2, committed  # or they came too early to cost
    for host, step in zip(hosts, committed, strict=True):
        resumed = [record["step"] for record in records(site, host, "resumed")]
        assert resumed in ([step] if step else [], []), host
        trained = [record["step"] for record in records(site, host, "metrics")]
        assert trained == list(range(step + 1, step + 1 + len(trained))), host
    state = site.folder / "last" / "output" / "demo" / f"checkpoint-{kind.steps}"
    assert json.loads((state / "trainer_state.json").read_text())["global_step"] == kind.steps
    found = rewards(site, hosts)
    assert sorted(found) == list(range(1, kind.steps + 1))
    sys.stdout.write(f"began at {committed}; thirds {thirds(found)}\n")
    return found


def test_ten_kills_cost_only_what_no_checkpoint_held(tmp_path: Path, engine_python: str) -> None:
    with run_of(tmp_path / "undisturbed", FAKE, engine_python) as site:
        assert start(site, FAKE, "host0", engine_python).process.wait(300) == 0
        undisturbed = rewards(site, ["host0"])
        check_engines(site, FAKE)
    assert sorted(undisturbed) == list(range(1, FAKE.steps + 1))
    sys.stdout.write(f"undisturbed {thirds(undisturbed)}\n")

    with run_of(tmp_path / "killed", FAKE, engine_python) as site:
        killed = killed_run(site, FAKE, engine_python)
    for one, other in zip(thirds(killed), thirds(undisturbed), strict=True):
        assert one == pytest.approx(other, abs=NOISE)


def test_kills_beside_the_real_vllm(tmp_path: Path, engine_python: str) -> None:
    """The model learns to add all the same, and vLLM hears nothing that it refuses."""
    with run_of(tmp_path / "killed", REAL, engine_python) as site:
        first, _, last = thirds(killed_run(site, REAL, engine_python))
    assert last > first
