"""The command as the agent runs it: exit codes and the last line of standard output."""

from __future__ import annotations

import json
import os
import subprocess  # noqa: TID251 - this is about a command
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo_task"


def run(tmp_path: Path, *flags: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and last line for the demonstration's job with `changes`."""
    job = {
        "model": str(DEMO / "model"),
        "dataset": str(DEMO / "train.jsonl"),
        "rewards": ["rewards:exact_answer"],
        "python_path": [str(DEMO)],
        "output_dir": str(tmp_path / "out"),
        "gateway": "http://127.0.0.1:9",
        "grpo": {"max_steps": 1, "vllm_server_timeout": 0},
        "lora": {"r": 8, "target_modules": "all-linear"},
    }
    config = tmp_path / "job.json"
    config.write_text(json.dumps(job | changes))
    done = subprocess.run(
        [sys.executable, "-m", "asyncgrpo_engine.train", f"--config={config}", *flags],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT / "agent"), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, last


def test_a_check_that_finds_nothing(tmp_path: Path) -> None:
    code, last = run(tmp_path, "--check")
    assert code == 0
    assert last["ok"]["prompts"] == 225
    assert last["ok"]["attention"]


def test_a_check_that_finds_problems(tmp_path: Path) -> None:
    code, last = run(tmp_path, "--check", grpo={"max_stepz": 1}, lora={"r": 513})
    assert code == 78
    assert [problem["where"] for problem in last["error"]["problems"]] == [
        "train.max_stepz",
        "train.lora.r",
    ]


def test_a_run_checks_first(tmp_path: Path) -> None:
    code, last = run(tmp_path, rewards=["rewards:nothing"])
    assert code == 78
    assert "nothing" in last["error"]["problems"][0]["what"]


def test_a_run_whose_gateway_never_comes(tmp_path: Path) -> None:
    code, last = run(tmp_path)
    assert code == 1
    assert "was not ready" in last["error"]["problems"][0]["what"]
