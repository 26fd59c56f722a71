"""Real TRL for `scripts/bench run`: what it is told, and its process where no agent starts it.

The model has 0.63 million parameters, so that training takes part of a second on a CPU.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncgrpo_agent.procs import trl
from fakes.fleet import ROOT

TASK = ROOT / "scripts" / "demo_task"
MODEL = TASK / "model"
MIN_TOKENS, MAX_TOKENS = 32, 96  # of an answer; the model's context is 128
MEAN_TOKENS = (MIN_TOKENS + MAX_TOKENS) / 2
END_S = 40.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # as the demo's: the engines' processes want a core, too


def python() -> str:
    return os.environ.get("ASYNCGRPO_ENGINE_PYTHON", str(ROOT / ".engine" / "bin" / "python"))


def settings(*, batch: int, in_flight: int, sync_steps: int) -> list[str]:
    """What a trainer's agent is told, beside the demo's own settings."""
    values = {
        "train.max_steps": 100_000,  # the benchmark ends it
        "train.per_device_train_batch_size": batch,
        "train.max_inflight_tasks": in_flight,
        "train.max_completion_length": MAX_TOKENS,
        "train.weight_sync_steps": sync_steps,
        "train.eval.samples": 0,
    }
    return [f"--set={name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class Step:
    """One that TRL has logged."""

    number: int
    at_s: float  # wall clock
    values: Mapping[str, float]


def step_of(record: Mapping[str, Any], at_s: float) -> Step:
    return Step(record["step"], at_s, record["values"])


def p50(steps: Sequence[Step], name: str) -> float:
    """Of what TRL itself measured; a step that lacks it does not count."""
    values = [step.values[name] for step in steps if name in step.values]
    return round(statistics.median(values), 3)


@contextmanager
def training(agents_job: Path, folder: Path, server: str) -> Iterator[subprocess.Popen[bytes]]:
    """TRL with the very job that an agent gave it, but at another server."""
    folder.mkdir()
    job = json.loads(agents_job.read_text())
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "gateway": server, "output_dir": str(folder / "output")}))
    argv, additions = trl.train_command(
        python(),
        path,
        check=False,
        python_path=job["python_path"],
        scratch=folder,
        launch=trl.Launch(),
    )
    environment = {**os.environ, **additions, **ENVIRONMENT}
    with (folder / "train.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
