"""The systemd units: valid, strict, and with the times that the agents' own keys ask for."""

from __future__ import annotations

import re
import shutil
import subprocess  # noqa: TID251 - systemd's own judge is asked
import tomllib
from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Replica
from asyncgrpo_agent.config.training import Trainer
from asyncgrpo_agent.errors import EXIT_CONFIG
from asyncgrpo_agent.roles.replica_engine import STOP_VLLM_S

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = sorted((PACKAGING / "systemd").iterdir())
AGENTS = [unit for unit in UNITS if "mount" not in unit.name]
PROGRAM = "/opt/asyncgrpo-agent/current/agent/asyncgrpo-agent"
REST_S = 15
EXPOSURE_MAX = 3.0


def name_of(unit: Path) -> str:
    return unit.name


def analyze(unit: Path, folder: Path, *words: str) -> str:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    copy = folder / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))  # it is not installed here
    argv = ["systemd-analyze", "--no-pager", *words, str(copy)]
    done = subprocess.run(argv, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if "Unknown command" in said or "unrecognized option" in said:
        pytest.skip(f"this systemd-analyze has no {words[0]}")
    assert done.returncode == 0, said
    return said


@pytest.mark.parametrize("unit", UNITS, ids=name_of)
def test_a_unit_is_valid(unit: Path, tmp_path: Path) -> None:
    assert analyze(unit, tmp_path, "verify", "--man=no") == ""


@pytest.mark.parametrize("unit", UNITS, ids=name_of)
def test_a_unit_is_strict(unit: Path, tmp_path: Path) -> None:
    said = analyze(unit, tmp_path, "security", "--offline=yes")
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert float(exposure) <= EXPOSURE_MAX


def value(unit: Path, key: str) -> str:
    found = re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(found[-1])


@pytest.mark.parametrize("unit", AGENTS, ids=name_of)
def test_an_agent_says_how_it_is_and_stays_down_where_a_restart_is_no_help(unit: Path) -> None:
    assert value(unit, "Type") == "notify"
    assert float(value(unit, "WatchdogSec")) > 0
    assert value(unit, "Restart") == "on-failure"
    assert str(EXIT_CONFIG) in value(unit, "RestartPreventExitStatus").split()
    assert value(unit, "KillMode") == "mixed"  # vLLM and TRL are ended by the agent, in its order
    assert value(unit, "User") == "asyncgrpo"


def unit_of(role: str) -> Path:
    (unit,) = (unit for unit in UNITS if unit.name.startswith(f"asyncgrpo-{role}"))
    return unit


def test_a_trainer_may_save_before_it_is_killed() -> None:
    keys = Trainer()
    assert (
        float(value(unit_of("trainer"), "TimeoutStopSec")) >= keys.save_s + keys.mirror_s + REST_S
    )


def test_a_replica_may_drain_before_it_is_killed() -> None:
    example = tomllib.loads((PACKAGING / "examples" / "replica.toml").read_text())
    drain_s = max(Replica().drain_s, example["replica"]["drain_s"])
    assert float(value(unit_of("replica"), "TimeoutStopSec")) >= drain_s + STOP_VLLM_S + REST_S


def test_an_instance_is_named_for_its_gpus(tmp_path: Path) -> None:
    """What systemctl makes of asyncgrpo-replica@0,1, and systemd of that."""
    if shutil.which("systemd-escape") is None:
        pytest.skip("systemd-escape is not installed (apt-get install systemd)")
    argv = ["systemd-escape", "--template=asyncgrpo-replica@.service", "0,1"]
    name = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    assert name == r"asyncgrpo-replica@0\x2c1.service"
    argv = ["systemd-escape", "--unescape", "--instance", name]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0,1"  # as %I, which the agent gets
    assert "Environment=ASYNCGRPO_REPLICA_GPUS=%I" in unit_of("replica").read_text()
    (tmp_path / "asyncgrpo-replica@.service").write_text(
        unit_of("replica").read_text().replace(PROGRAM, "/bin/true")
    )
    argv = ["systemd-analyze", "--no-pager", "verify", "--man=no", str(tmp_path / name)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bucket_is_served_by_a_user_that_may_do_nothing() -> None:
    """What root does is done before, in the host's own file system."""
    text = unit_of("mount").read_text()
    assert value(unit_of("mount"), "CapabilityBoundingSet") == ""
    assert value(unit_of("mount"), "User") not in ("root", "asyncgrpo")
    assert value(unit_of("mount"), "FileDescriptorStoreMax") == "1"
    privileged = re.findall(r"^Exec\w+=-?\+(.*)$", text, re.MULTILINE)
    inside = "/usr/bin/nsenter --target 1 --mount "
    assert [line.startswith(inside) for line in privileged].count(False) == 1  # mkdir
    assert value(unit_of("mount"), "ExecStart").endswith('"$BUCKET" /dev/fd/3\'')


@pytest.mark.parametrize("role", ["replica", "trainer"])
def test_engines_keep_their_gpus_and_wait_for_their_bucket(role: str) -> None:
    text = unit_of(role).read_text()
    assert "PrivateDevices" not in text.split("NoNewPrivileges")[1]
    assert "DeviceAllow=char-nvidia-uvm rw" in text
    assert re.search(r"^After=.*asyncgrpo-mount@bucket\.service", text, re.MULTILINE)
