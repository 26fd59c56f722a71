"""`plan`: its flags, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import subprocess  # noqa: TID251 - as a user starts it
import sys

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.plan_command import count, number, seconds

QUICK = ("--simulate=60s", "--sync-every=10s", "--slots=8", "--tokens-per-s=200")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *QUICK, *words]) == 0
    return capsys.readouterr().out


def test_the_table_says_all_that_a_plan_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--replicas=3", "--adapter-mb=40", "--spot-life=5m", "--boot=10s")
    for row in ("fleet", "throughput", "idle share", "proxies", "sync", "S3 an hour", "dollars"):
        assert any(line.startswith(row) for line in out.splitlines()), row
    assert "3 replicas, adapter 40 MB, sync every 10 s" in out
    assert "Bottleneck: " in out
    assert "To change it: " in out or "More of them" in out


def test_json_has_the_same_figures_and_what_they_are_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(plan(capsys, "--replicas=3", "--json", "--in-flight=4"))
    assert found["inputs"]["replicas"] == 3
    assert found["inputs"]["load"]["in_flight"] == 4
    assert found["limits"][0]["name"] == "in_flight"
    assert found["limits"][0]["change"] in found["verdict"]
    assert 0 < found["idle_share"] < 1
    assert found["dollars_per_h"] == pytest.approx(sum(found["dollars"].values()))


def test_the_seed_decides(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (plan(capsys, "--json", f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again
    assert json.loads(first)["sync"] != json.loads(other)["sync"]


@pytest.mark.parametrize(
    ("text", "value"), [("30s", 30), ("250ms", 0.25), ("4h", 14400), ("1.5", 1.5), ("2d", 172800)]
)
def test_times_have_units(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-3s", "3 s", "1w", "s", "nan", "٣s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="30s"):
        seconds(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "x"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        number(text)
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--replicas=0",
        "--replicas=5000",
        "--adapter-mb=0.01",
        "--adapter-mb=99999",
        "--quorum=1.5",
        "--sync-every=0",
        "--tokens-per-s=100000",
        "--tokens-per-s=3",
        "--completion-tokens=9999",
    ],
)
def test_a_fleet_that_cannot_be_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", flag]) == 2
    assert "plan --help" in capsys.readouterr().err


def test_help_shows_each_default_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    out = capsys.readouterr().out
    for part in ("(30s)", "(30ms)", "(300s)", "(0.09)", "--price-egress USD"):
        assert part in out


def test_help_simulates_nothing() -> None:
    code = (
        "import sys\nfrom asyncgrpo_agent import cli\n"
        "try: cli.main(['plan', '--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert "asyncgrpo_agent.plan.site" not in ran.stdout.split()
    assert "trio" not in ran.stdout.split()
