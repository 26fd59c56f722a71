"""scripts/chaos: a seed is a schedule, and a fleet that is broken by it serves on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess  # noqa: TID251 - as a user starts it
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.fleet import ROOT

REPLICAS = ["r1", "r2", "r3", "r4", "r5", "r6"]


@pytest.fixture(scope="module")
def schedule() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chaos_schedule", ROOT / "scripts/chaos_parts/schedule.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan(schedule: ModuleType, seed: int = 1, minutes: float = 30) -> list[Any]:
    found: list[Any] = schedule.plan(seed=seed, seconds=60 * minutes, replicas=REPLICAS)
    return found


def test_a_seed_gives_the_same_faults_at_the_same_points(schedule: ModuleType) -> None:
    assert plan(schedule) == plan(schedule)
    assert plan(schedule) != plan(schedule, seed=2)


def test_there_is_a_fault_every_five_seconds_and_each_kind_comes(schedule: ModuleType) -> None:
    faults = plan(schedule)
    assert 0.8 * 360 <= len(faults) <= 1.1 * 360
    kinds = {fault.kind for seed in range(4) for fault in plan(schedule, seed)}
    assert kinds == set(schedule.KINDS)
    assert all(fault.ends_s < 1800 for fault in faults)
    assert [fault.number for fault in faults] == list(range(len(faults)))


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_is_never_asked_for_more_than_it_can_bear(schedule: ModuleType, seed: int) -> None:
    faults, kinds = plan(schedule, seed), schedule.KINDS
    for fault in faults:
        held = [
            one for one in faults if one.at_s <= fault.at_s < one.ends_s + kinds[one.kind].heals_s
        ]
        hosts = [one.host for one in held]
        assert len(set(hosts)) == len(hosts)  # one at a time on each
        assert sum(host in schedule.PARTS_OF_THE_WHOLE for host in hosts) <= 1
        out = [one for one in held if kinds[one.kind].is_out and one.host in REPLICAS]
        assert len(out) <= len(REPLICAS) // 2
    ends = [fault.at_s for fault in faults if kinds[fault.kind].ends_trl]
    assert all(after - before >= 300 for before, after in pairwise(ends))


def chaos(target: Path, *options: str) -> dict[str, Any]:
    """The figures of one run, in which nothing broke."""
    missing = [tool for tool in ("ip", "nft", "nsenter") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip(f"needs root, /dev/fuse, and commands that are missing: {missing}")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/chaos_parts/main.py", *options, "--json", target],
        env={**os.environ, "PYTHONPATH": f"{ROOT}/agent:{ROOT}/tests"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def assert_nothing_broke(found: dict[str, Any]) -> None:
    for name in ("rollouts_failed", "wrong_bytes", "leaks", "unreported_faults"):
        assert found[name] == 0, found
    assert found["steps_done"] >= found["steps_wanted"] > 0
    assert found["rollouts"] > 0


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    found = chaos(tmp_path / "chaos.json", "--minutes=0.4", "--seed=4", "--calibrate-s=6")
    assert_nothing_broke(found)


@pytest.mark.deep
@pytest.mark.slow
def test_ten_minutes(tmp_path: Path) -> None:
    found = chaos(tmp_path / "chaos.json", "--minutes=10", "--seed=1")
    assert_nothing_broke(found)
    assert found["throughput_ratio"] >= 0.7
