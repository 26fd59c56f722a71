from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncgrpo_agent.procs.installed_engine import python_with


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_the_python_of_the_path_that_has_it(bin_folder: Path) -> None:
    assert python_with("trio") is None
    (bin_folder / "python3").symlink_to("/usr/bin/false")
    assert python_with("trio") is None
    environment = Path(sys.executable)  # a link, which is what makes it an environment
    program = bin_folder / "python"
    program.write_text(f'#!/bin/sh\nexec {environment} "$@"\n')
    program.chmod(0o755)
    assert python_with("trio") == program
    assert python_with("no_such_engine") is None
