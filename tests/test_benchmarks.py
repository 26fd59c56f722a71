"""Benchmarks run to their end and report what they promise; how fast they are is not asked here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess  # noqa: TID251 - as a user starts them
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.fleet import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def engine_python() -> str:
    found = os.environ.get("ASYNCGRPO_ENGINE_PYTHON", "")
    if not found:
        pytest.skip("ASYNCGRPO_ENGINE_PYTHON names no Python with vLLM and TRL")
    return found


def bench(name: str, *arguments: str, target: Path, code: int = 0) -> dict[str, Any]:
    """The numbers of one benchmark."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/benchmarks" / f"{name}.py", *arguments, "--json", target],
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/agent:{ROOT}/tests"},
    )
    assert done.returncode == code
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@pytest.mark.parametrize("source", ["bucket", "link"])
def test_sync(tmp_path: Path, source: str) -> None:
    options = ("--mount=dir", "--size-mb=1", "--rounds=2", f"--source={source}")
    found = bench("sync", *options, target=tmp_path / "sync.json")
    ours, reference = found["ours"], found["reference"]
    assert 0 < ours["first_p50_s"] <= ours["p50_s"] <= ours["p95_s"]
    assert ours["first_p50_s"] <= ours["quorum_p50_s"]
    assert 0 < reference["p50_s"] <= reference["p95_s"]
    assert reference["tokens_during_over_before"] < ours["tokens_during_over_before"]
    phases = ["uploaded", "announced", "visible", "copied", "verified", "loaded", "acked"]
    assert [name for name in phases if name in ours["phases"]] == list(ours["phases"])
    assert {"uploaded", "loaded", "acked"} <= ours["phases"].keys()
    assert found["failed_rollouts"] == 0
    assert 0 < found["mount_worker_rss_mb"] < found["agent_rss_mb"]


def test_proxy(tmp_path: Path) -> None:
    windows = ("--seconds=0.5", "--rounds=1", "--connections=8", "--place-s=2", "--fleets=2")
    loads = ("--hold-requests=40", "--hold-s=1", "--place-requests=40", "--no-baseline")
    found = bench("proxy", *windows, *loads, target=tmp_path / "proxy.json")
    assert found["saturate"].keys() == {"rps", "cpu_us_gateway", "cpu_us_proxy"}
    assert found["saturate"]["rps"] > 0
    assert found["hold"]["failed"] == 0
    assert found["hold"]["added_p50_ms"] <= found["hold"]["added_p99_ms"]
    placed = found["place"]["2"]
    assert placed["affinity"] + placed["spill"] + placed["unmatched"] == pytest.approx(1, abs=1e-3)
    assert placed["affinity"] > placed["spill"] >= 0


def test_quorum(tmp_path: Path) -> None:
    times = ("--rounds=1", "--seconds=0.6", "--generate-s=0.4", "--train-s=0.2")
    shape = ("--replicas=2", "--batch=16", "--in-flight=32", "--size-mb=1", "--slow-load-s=0.3")
    found = bench("quorum", "--mount=dir", *times, *shape, target=tmp_path / "quorum.json")
    for case in (found, found["slow"]):
        assert list(case["ours"]) == ["0", "0.5", "1"]
        for row in (*case["ours"].values(), case["reference"]):
            assert row["samples_per_s"] == pytest.approx(16 * row["steps_per_s"], rel=0.01)
            assert row["tokens_per_s"] > 0
            assert row["sync_p50_s"] <= row["sync_p95_s"]
            assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= 4
            assert row["failed_rollouts"] == 0
        assert [row["paused_s"] for row in case["ours"].values()] == [0, 0, 0]
        assert case["reference"]["paused_s"] > 0
        assert case["ratio"] > 0
    assert found["slow"]["ours"]["0"]["sync_p50_s"] < found["slow"]["ours"]["1"]["sync_p50_s"]
    assert found["slow"]["reference"]["sync_p50_s"] > 0.3


@pytest.mark.engine
@pytest.mark.deep
def test_run(tmp_path: Path, engine_python: str) -> None:
    times = ("--steps=2", "--generate-s=2", "--rollout-s=1", "--seconds=3")
    shape = ("--batch=16", "--in-flight=32", "--mount=dir")
    found = bench("run", *times, *shape, target=tmp_path / "run.json")
    for row in (found["ours"], found["reference"]):
        assert row["samples_per_s"] > 0
        assert 0 < row["sync_p50_s"] < row["step_p50_s"]
    assert found["ratio"] > 0
    assert found["direct"].keys() == {"rollouts_per_s", "through", "ratio"}
    assert found["direct"]["ratio"] > 0.8


@pytest.mark.deep
def test_view(tmp_path: Path) -> None:
    if not shutil.which("chromium") or not (ROOT / "tests/web/node_modules").is_dir():
        pytest.skip("no chromium here, or no packages in tests/web (npm ci)")
    shape = ("--steps=60", "--replicas=3", "--syncs=40", "--seconds=1", "--rounds=1")
    found = bench("view", *shape, target=tmp_path / "view.json")
    assert 0 < found["paint_s"] < 60
    assert 0 < found["rss_mb_bare"] < found["rss_mb_viewed"]
    assert 0 <= found["cpu_share_open"] < 1
    assert found["answers_bytes"].keys() == {"snapshot", "series", "syncs", "events"}
    assert found["live_bytes_per_s"] > 0


@pytest.mark.slow
def test_all_writes_a_page_that_asks_for_nothing(tmp_path: Path) -> None:
    """Of one phase, twice: the second adds to the first."""
    target, html = tmp_path / "all.json", tmp_path / "all.html"
    target.write_text(json.dumps({"phases": {"proxy": PROXY | ABOUT, "run": FAILED | ABOUT}}))
    options = ("--quick", "--add", "--phases=sync", f"--html={html}")
    found = bench("all", *options, target=target, code=1)  # for the phase that had failed
    assert found["phases"].keys() == {"proxy", "run", "sync"}
    by_name = {(row["phase"], row["name"]): row for row in found["figures"]}
    proxy = by_name["proxy", "CPU of a rollout, gateway and proxy"]
    assert (proxy["ours"], proxy["reference"], proxy["ratio"]) == (600.0, 400.0, 1.5)
    assert by_name["sync", "until all replicas serve, p50"]["ratio"] > 0
    machine = found["machine"]
    assert machine["cores"] >= 1
    assert {"cpu", "kernel", "python", "agent", "libraries", "engine"} <= machine.keys()
    text = html.read_text()
    assert "Disturbed by other load: proxy: others used 1.5 cores when it began" in text
    assert "Not measured: ended with 1" in text
    assert "1.50" in text or ">1.5<" in text
    assert text.count("<svg") == 3
    assert not re.search(r"<(script|link|img)|https?://|src=", text)
    assert str(ROOT) not in text


@pytest.mark.engine
@pytest.mark.deep
def test_all_of_them(tmp_path: Path, engine_python: str) -> None:
    found = bench("all", "--quick", f"--html={tmp_path}/all.html", target=tmp_path / "all.json")
    assert list(found["phases"]) == ["link", "sync", "sync_late", "proxy", "run", "view"]
    measured = {name for name, row in found["phases"].items() if "numbers" in row}
    assert measured >= {"link", "sync", "sync_late", "proxy", "run"}
    assert {row["phase"] for row in found["figures"]} == measured


ABOUT = {"began": "2026-12-03 12:00 UTC", "load_before": 1.0, "busy_before": 1.5, "seconds": 9.0}
FAILED = {"failed": "ended with 1"}
PROXY = {
    "numbers": {
        "saturate": {
            "rps": 1000.0,
            "cpu_us_gateway": 300.0,
            "cpu_us_proxy": 300.0,
            "baseline_rps": 2000.0,
            "baseline_cpu_us": 400.0,
        },
        "hold": {"failed": 0, "added_p50_ms": 5.0, "added_p99_ms": 9.0},
        "place": {"2": {"affinity": 0.7, "spill": 0.1, "unmatched": 0.2, "imbalance": 0.05}},
    }
}
