"""The demo with real TRL and real vLLM, shortened: what a newcomer types."""

import json
import os
import shutil
import subprocess  # noqa: TID251 - run as a user would
import sys
from pathlib import Path

import pytest

from fakes import fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow]
TASK = fleet.ROOT / "scripts" / "demo_task"
STEPS = 12


def agent(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncgrpo_agent", *arguments],
        env={**os.environ, "PYTHONPATH": str(fleet.ROOT / "agent")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_short_run_with_the_real_engines(tmp_path: Path, engine_python: str) -> None:
    done = agent(
        "--role=local",
        f"--config={TASK / 'demo.toml'}",
        f"--state-dir={tmp_path}",
        f"--engine-python={engine_python}",
        f"--set=train.max_steps={STEPS}",
        "--set=train.eval.samples=60",
        timeout_s=420,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    history = (tmp_path / "trainer/trainer/demo/history.jsonl").read_text()
    records = [json.loads(line) for line in history.splitlines()]
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("sync", "totals")}
    metrics = [r for r in records if r["kind"] == "metrics" and "ratio" in r["values"]]
    assert len(metrics) == STEPS
    ratios = [r["values"]["ratio"] for r in metrics]
    assert 0.97 < sum(ratios) / len(ratios) < 1.03
    assert all(0 <= r["values"]["reward"] <= 1 for r in metrics)
    assert len(by_kind["sync"]) >= STEPS
    totals = by_kind["totals"][0]
    assert totals["rollouts_failed"] == 0
    assert [row["paused_s"] for row in totals["replicas"]] == [0, 0]
    assert all(row["requests"] > 0 for row in totals["replicas"])
    final = tmp_path / "trainer" / "output" / "demo" / "final"
    assert (final / "adapter_model.safetensors").exists()
    fleet.wait_until_none(str(tmp_path))


def test_a_chat_template_that_trl_does_not_know(tmp_path: Path, engine_python: str) -> None:
    model = shutil.copytree(TASK / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }} of nobody's making")
    done = agent(
        "--role=local",
        f"--config={TASK / 'demo.toml'}",
        f"--state-dir={tmp_path / 'state'}",
        f"--engine-python={engine_python}",
        f"--model={model}",
        timeout_s=120,
    )
    assert done.returncode == 78, done.stdout + done.stderr
    assert "chat template" in done.stderr
    fleet.wait_until_none(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('train.rewards=["rewards:no_such_function"]', "no_such_function"),
        ('train.rewards=["no_such_module:f"]', "no_such_module"),
        ("train.learning_rat=1", "learning_rate"),
        ("train.dataset=/no/such/file.jsonl", "/no/such/file.jsonl"),
    ],
)
def test_what_cannot_work_ends_soon_and_says_so(
    tmp_path: Path, engine_python: str, setting: str, words: str
) -> None:
    done = agent(
        "--role=local",
        f"--config={TASK / 'demo.toml'}",
        f"--state-dir={tmp_path}",
        f"--engine-python={engine_python}",
        f"--set={setting}",
        timeout_s=120,
    )
    assert done.returncode == 78, done.stdout + done.stderr
    assert words in done.stderr
    fleet.wait_until_none(str(tmp_path))
