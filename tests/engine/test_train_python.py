"""Runs this folder's tests in the engine's Python, for whoever started pytest in another.

The engine's Python need not have pytest: it borrows this one, which is Python code only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess  # noqa: TID251 - starts another Python's tests
from importlib.metadata import version
from pathlib import Path

import pytest

PYTHON = os.environ.get("ASYNCGRPO_ENGINE_PYTHON", "")
BORROWED = (
    "pytest",
    "_pytest",
    "py.py",
    "pluggy",
    "iniconfig",
    f"pytest-{version('pytest')}.dist-info",
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.skipif(not PYTHON, reason="ASYNCGRPO_ENGINE_PYTHON names no Python")
@pytest.mark.skipif(bool(importlib.util.find_spec("trl")), reason="this is the engine's Python")
def test_the_engine_tests_pass_in_the_engines_python(tmp_path: Path) -> None:
    site = Path(pytest.__file__).parents[1]
    for name in BORROWED:
        (tmp_path / name).symlink_to(site / name)
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", str(Path(__file__).parent)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
