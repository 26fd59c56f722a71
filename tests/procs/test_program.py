import os
import subprocess  # noqa: TID251 - what the command does is looked at
import sys
from pathlib import Path

import pytest

from asyncgrpo_agent.procs.program import worker_command, worker_environment


def test_a_worker_finds_this_program_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asyncgrpo_agent.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    command, env = worker_command("mount-look", "."), worker_environment()
    assert env["PYTHONPATH"].endswith(f"{os.pathsep}elsewhere")
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True)
    assert int(done.stdout) == tmp_path.stat().st_mode


def test_a_frozen_worker_is_a_part_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setenv("_PYI_APPLICATION_HOME_DIR", "/tmp/_MEI1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/tmp/_MEI1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert worker_command("mount-worker") == [sys.executable, "mount-worker"]
    env = worker_environment()
    assert env["LD_LIBRARY_PATH"] == env["_PYI_APPLICATION_HOME_DIR"] == "/tmp/_MEI1"
    assert "PYTHONPATH" not in env
    assert "PYINSTALLER_RESET_ENVIRONMENT" not in env
