from pathlib import Path
from time import monotonic

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.config import host
from asyncgrpo_agent.config.sections import Bucket, Config
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.procs import look
from fakes.strict_mount import StrictBucket


def problems(path: Path) -> list[str]:
    """What is wrong with the bucket there."""
    config = Config(role="trainer", bucket=Bucket(path=str(path)))
    return [problem.what for problem in host._bucket(config)]


def test_a_bucket_must_be_a_folder(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    assert problems(tmp_path / "no") == [f"{tmp_path}/no does not exist"]
    (tmp_path / "file").touch()
    assert problems(tmp_path / "file") == [f"{tmp_path}/file is not a folder"]


def test_a_bucket_that_does_not_answer_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "LOOK_S", 0.3)
    with StrictBucket(tmp_path).mount("host") as mounted:
        mounted.hang("lookup")
        began = monotonic()
        assert problems(mounted.path / "folder") == []
        assert monotonic() - began < 2.0
        mounted.release()
        look._stuck.pop().communicate()
        mounted.kill()
        assert problems(mounted.path) == []


def test_other_platforms_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("asyncgrpo_agent.logs.set_up", lambda **_options: None)
    host.check_platform()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cli.main(["--role=proxy", f"--state-dir={tmp_path}"]) == 78
    assert "Linux on aarch64 is not supported" in capsys.readouterr().err


def test_vllm_that_pip_has_installed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_shipped_engines", lambda: [tmp_path / "engine/bin/python"])
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$*" in *vllm*) exit 0 ;; esac\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.engine_python(Config(role="replica")) == python
    with pytest.raises(ConfigError, match="and trl in python3"):
        host.engine_python(Config(role="trainer"))


def test_the_engine_of_a_checkout_is_at_its_root() -> None:
    root = Path(__file__).parents[2]
    assert host._shipped_engines() == [root / "engine/bin/python", root / ".engine/bin/python"]
