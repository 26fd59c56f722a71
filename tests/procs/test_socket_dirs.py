"""Where vLLM's socket lies, and what becomes of the folders of agents that were killed."""

from __future__ import annotations

import os
import stat
import subprocess  # noqa: TID251 - it is killed
import sys
from pathlib import Path

import pytest

from asyncgrpo_agent.procs import socket_dirs
from asyncgrpo_agent.procs.socket_dirs import MAX_SOCKET_PATH_BYTES, socket_dir
from fakes.fleet import ROOT


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_socket_folder_is_private_short_and_removed(roots: pytest.MonkeyPatch) -> None:
    with socket_dir() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == Path("/tmp")
        assert len(os.fsencode(folder / "vllm.sock")) <= MAX_SOCKET_PATH_BYTES
        (folder / "vllm.sock").touch()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_socket_folder_is_where_the_host_wants_it(
    roots: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    roots.setenv(name, str(tmp_path))
    with socket_dir() as folder:
        assert folder.parent == tmp_path


@pytest.mark.parametrize("root", ["/nowhere", "relative"])
def test_unusable_root_is_passed_over(roots: pytest.MonkeyPatch, root: str) -> None:
    roots.setenv("XDG_RUNTIME_DIR", root)
    with socket_dir() as folder:
        assert folder.parent == Path("/tmp")


def test_root_with_a_long_path_is_passed_over(roots: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * MAX_SOCKET_PATH_BYTES)
    deep.mkdir()
    roots.setenv("XDG_RUNTIME_DIR", str(deep))
    with socket_dir() as folder:
        assert folder.parent == Path("/tmp")


def test_folders_of_killed_agents_go_and_those_of_living_ones_stay(
    roots: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roots.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    roots.setattr(socket_dirs, "YOUNG_S", -1.0)
    killed, living = _holder(tmp_path), _holder(tmp_path)
    foreign = tmp_path / "agrpo-12345678"  # not by this module, so nobody knows who uses it
    foreign.mkdir()
    assert len(_folders(tmp_path)) == 2
    killed.kill()
    killed.communicate()
    assert len(_folders(tmp_path)) == 2
    with socket_dir() as mine:
        left = _folders(tmp_path)
        assert mine in left
        assert len(left) == 2
    assert len(_folders(tmp_path)) == 1
    living.communicate(b"end")
    assert _folders(tmp_path) == []
    assert foreign.exists()


def test_one_that_was_just_made_is_left_alone(roots: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between its making and its lock."""
    roots.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    young = tmp_path / f"{socket_dirs.PREFIX}12345678"
    young.mkdir()
    with socket_dir():
        assert young.exists()


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob(f"{socket_dirs.PREFIX}*"))


def _holder(root: Path) -> subprocess.Popen[bytes]:
    """A process that has a folder until its standard input ends."""
    program = (
        "import sys\nfrom asyncgrpo_agent.procs.socket_dirs import socket_dir\n"
        "with socket_dir(): print('held', flush=True); sys.stdin.read()"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}/agent", "XDG_RUNTIME_DIR": str(root)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process
