"""Run the demo's training with `asyncgrpo-agent --role local` and report what it measured.

Everything in the report comes from the history that the trainer's agent wrote while it ran.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncgrpo_agent.core import progress as p
from asyncgrpo_agent.core.progress import Progress
from asyncgrpo_agent.store import history

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
from chart import reward_chart  # noqa: E402 - beside this script


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="asyncgrpo-demo-"))
    print(f"Running in {folder}: logs/ there holds a file for each process.", flush=True)
    began = time.monotonic()
    code = subprocess.call(_command(options, folder), cwd=ROOT)
    wall_s = time.monotonic() - began
    if code != 0:
        print(f"The run ended with exit code {code}; see {folder}/logs", file=sys.stderr)
        return code
    run = _read(folder)
    result = measured(run, replicas=options.replicas, install_s=options.install_s, wall_s=wall_s)
    _show(result, run)
    html = Path(options.html)
    html.write_text(reward_chart(run, result), encoding="utf-8")
    print(f"Chart: {html}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
        print(f"Figures: {options.json}")
    if not options.keep_files:
        shutil.rmtree(folder)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the measured figures")
    parser.add_argument("--html", metavar="FILE", default="demo-report.html", help="the chart")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--keep-files", action="store_true", help="keep logs, adapters, history")
    parser.add_argument("--install-s", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "asyncgrpo_agent",
        "--role=local",
        f"--config={HERE / 'demo.toml'}",
        f"--state-dir={folder}",
        f"--engine-python={ROOT / '.engine' / 'bin' / 'python'}",
        f"--replicas={options.replicas}",
    ]
    if options.steps:
        command.append(f"--set=train.max_steps={options.steps}")
    return command


def _read(folder: Path) -> Progress:
    run = Progress()
    for record in history.read(next(folder.glob("trainer/trainer/*/history.jsonl"))):
        run.add(record)
    return run


def measured(run: Progress, *, replicas: int, install_s: float, wall_s: float) -> dict[str, object]:
    """The demo's figures, all from the run's own history."""
    rewards, ratios = run.series(p.REWARD), run.series(p.RATIO)
    first, last = p.quarter_means(rewards)
    before, after = run.evaluations.get("before"), run.evaluations.get("after")
    syncs = [sync.seconds for sync in run.syncs]
    rows = run.totals.get("replicas", [])
    return {
        "steps": run.steps[-1].step if run.steps else 0,
        "replicas": replicas,
        "reward_first_quarter": round(first, 4),
        "reward_last_quarter": round(last, 4),
        "heldout_prompts": after.prompts if after else 0,
        "heldout_samples": after.samples if after else 0,
        "heldout_accuracy_before": before.accuracy if before else None,
        "heldout_accuracy_during": [round(value, 4) for value in run.series("eval/accuracy")],
        "heldout_accuracy_after": after.accuracy if after else None,
        "ratio_mean": round(sum(ratios) / len(ratios), 5) if ratios else None,
        "ratio_min": round(min(ratios), 5) if ratios else None,
        "ratio_max": round(max(ratios), 5) if ratios else None,
        "syncs": len(syncs),
        "sync_p50_s": round(p.percentile(syncs, 0.5), 4),
        "sync_p95_s": round(p.percentile(syncs, 0.95), 4),
        "paused_s": round(sum(row["paused_s"] for row in rows), 3),
        "rollouts": run.totals.get("rollouts", 0),
        "rollouts_failed": run.totals.get("rollouts_failed", 0),
        "rollouts_resent": run.totals.get("resent", 0) + run.totals.get("retried", 0),
        "rollouts_held_s": round(run.totals.get("held_s", 0.0), 3),
        "routed": run.totals.get("routed", {}),
        "replica_requests": [row["requests"] for row in rows],
        "install_s": install_s,
        "wall_s": round(wall_s, 1),
    }


def _show(result: dict[str, object], run: Progress) -> None:
    table = Table(title="What the run measured", show_header=False)
    for name, value in result.items():
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    console.print("reward", p.sparkline(run.series(p.REWARD), 80), highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
