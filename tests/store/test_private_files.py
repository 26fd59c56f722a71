from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store import private_files


def test_a_file_is_replaced_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = private_files.private_folder(tmp_path / "a" / "b") / "file"
        path.with_name("file.new").write_text("left by a crash")
        private_files.write(path, b"one")
        private_files.write(path, b"two")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_json_comes_back_and_a_missing_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert private_files.read_json(path, {"a": 0}) == {"a": 0}
    private_files.write_json(path, {"a": [1, "x", None]})
    assert private_files.read_json(path, {}) == {"a": [1, "x", None]}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    private_files.write(path, b"secret")
    assert private_files.read_secret(path) == b"secret"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        private_files.read_secret(path)
    assert caught.value.fix == f"chmod 600 {path}"


def test_a_folder_that_takes_files_is_writable_and_keeps_none(tmp_path: Path) -> None:
    assert private_files.is_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not private_files.is_writable(tmp_path / "missing")
