"""All benchmarks one after the other, with the machine that they ran on, as JSON and as a page.

Each phase is a benchmark of its own, in its own process, and measures the reference way in the same
run. A phase that fails is told and does not stop the others. `--add` keeps what the JSON file has
of other phases, so that a long run may be split.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from all_figures import figures
from all_machine import machine
from all_page import BUSY, disturbance, page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SETTLE_WINDOWS = 10
STOP_S = 60.0
IDLE, WAIT, STEAL = 3, 4, 7  # in /proc/stat

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`quick` are the options that make it short; `needs` what it cannot be measured without."""

    name: str
    script: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    needs: str = ""


PHASES = (
    Phase(name="link", script="link", quick=("--seconds=0.3", "--rounds=1")),
    Phase(
        name="sync",
        script="sync",
        options=("--mount=strict",),
        quick=("--rounds=2", "--size-mb=1"),
        needs="fuse",
    ),
    Phase(
        name="sync_late",
        script="sync",
        options=("--mount=hf-like",),
        quick=("--rounds=1", "--size-mb=1"),
        needs="fuse",
    ),
    Phase(
        name="proxy",
        script="proxy",
        quick=(
            *("--seconds=0.5", "--rounds=1", "--connections=8", "--place-s=2", "--fleets=2"),
            *("--hold-requests=40", "--hold-s=1", "--place-requests=40"),
        ),
    ),
    Phase(
        name="run",
        script="run",
        quick=(
            *("--steps=2", "--generate-s=2", "--rollout-s=1", "--seconds=3"),
            *("--batch=16", "--in-flight=32", "--mount=dir"),
        ),
        needs="engine",
    ),
    Phase(
        name="view",
        script="view",
        quick=("--steps=60", "--replicas=3", "--syncs=40", "--seconds=1", "--rounds=1"),
        needs="browser",
    ),
)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = options.phases.split(",")
    found = earlier(options)
    found["quick"] = options.quick
    for phase in PHASES:
        if phase.name in names:
            found["phases"][phase.name] = measured(phase, options)
            found["figures"] = figures(found["phases"])
            write(found, options)
    print_table(found)
    return int(any("failed" in row for row in found["phases"].values()))


def parse() -> argparse.Namespace:
    known = [phase.name for phase in PHASES]
    parser = argparse.ArgumentParser(prog="scripts/bench all", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts there")
    parser.add_argument("--phases", default=",".join(known), help="(%(default)s)")
    parser.add_argument("--add", action="store_true", help="keep other phases of the JSON file")
    parser.add_argument(
        "--quick", action="store_true", help="short phases: whether it works at all"
    )
    options = parser.parse_args()
    if unknown := set(options.phases.split(",")) - set(known):
        parser.error(f"there is no phase {', '.join(sorted(unknown))}: {', '.join(known)}")
    if options.add and options.json is None:
        parser.error("--add needs --json FILE")
    return options


def earlier(options: argparse.Namespace) -> Numbers:
    fresh: Numbers = {"machine": machine(), "phases": {}, "figures": []}
    if options.add and options.json.exists():
        return fresh | {"phases": json.loads(options.json.read_text())["phases"]}
    return fresh


def measured(phase: Phase, options: argparse.Namespace) -> Numbers:
    """The numbers of one benchmark, when it ran, and how busy the machine was before."""
    about: Numbers = {
        "busy_before": round(settled(1 if options.quick else SETTLE_WINDOWS), 2),
        "began": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2),
    }
    if lacking := lacks(phase.needs):
        print(f"== {phase.name}: left out, for there is no {lacking}", flush=True)
        return about | {"left_out": f"there is no {lacking} here"}
    print(f"== {phase.name}", flush=True)
    began, before = time.monotonic(), ticks()
    with tempfile.TemporaryDirectory(prefix="bench-all-") as folder:
        target = Path(folder) / "numbers.json"
        words = [*phase.options, *(phase.quick if options.quick else ()), "--json", str(target)]
        command = [sys.executable, str(HERE / f"{phase.script}.py"), *words]
        code = ended(command)
        about["seconds"] = round(time.monotonic() - began, 1)
        spent = [b - a for a, b in zip(before, ticks(), strict=True)]
        about["stolen"] = round(spent[STEAL] / sum(spent), 3)
        if code != 0 or not target.exists():
            return about | {"failed": f"ended with {code}"}
        return about | {"numbers": json.loads(target.read_text())}


def ended(command: list[str]) -> int:
    """Its exit code. Whatever ends this ends it as well, in good order: it has children."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait(STOP_S)
        raise


def settled(windows: int) -> float:
    """Cores in use once what ran before has ended, or at last."""
    for _ in range(windows):
        if (used := busy()) < BUSY:
            break
    return used


def busy(window_s: float = 2.0) -> float:
    """Cores that are in use now, by whomever: a load average is a minute old."""
    first, began = used_s(), time.monotonic()
    time.sleep(window_s)
    return (used_s() - first) / (time.monotonic() - began)


def used_s() -> float:
    now = ticks()
    return (sum(now) - now[IDLE] - now[WAIT] - now[STEAL]) / os.sysconf("SC_CLK_TCK")


def ticks() -> list[int]:
    """Of all cores since the start: user, nice, system, idle, wait, interrupts, soft ones, steal.

    What is stolen was wanted here, and given to another guest of the host.
    """
    return [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def lacks(need: str) -> str:
    """What is not here, in words; empty if all is."""
    if need == "fuse" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse"
    if need == "engine" and not engine_python().exists():
        return "Python with TRL (ASYNCGRPO_ENGINE_PYTHON)"
    is_there = shutil.which("chromium") and (ROOT / "tests/web/node_modules").is_dir()
    return "Chromium with the packages of tests/web" if need == "browser" and not is_there else ""


def engine_python() -> Path:
    return Path(os.environ.get("ASYNCGRPO_ENGINE_PYTHON") or ROOT / ".engine/bin/python")


def write(found: Numbers, options: argparse.Namespace) -> None:
    """After each phase, so that a run that is cut is not lost."""
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.html is not None:
        options.html.write_text(page(found), encoding="utf-8")


def print_table(found: Numbers) -> None:
    print(f"\n{'':56}{'ours':>12}{'reference':>12}{'ratio':>8}")
    for row in found["figures"]:
        reference = "" if row["reference"] is None else f"{row['reference']:,.4g}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        name = f"{row['name']}, {row['unit']}" if row["unit"] else row["name"]
        print(f"{row['phase']:10}{name:46}{row['ours']:>12,.4g}{reference:>12}{ratio:>8}")
    for name, row in found["phases"].items():
        if why := row.get("failed") or row.get("left_out") or disturbance(row):
            print(f"{name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
