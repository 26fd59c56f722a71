"""The sentences that the page makes itself: who holds up the syncs, and what is served."""

from __future__ import annotations

import os
import shutil
import subprocess  # noqa: TID251 - the page's own language
from pathlib import Path

import pytest

from asyncgrpo_agent.roles.proxy_assets import FOLDER


def test_findings(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        if "CI" in os.environ:
            pytest.fail("CI must have node")
        pytest.skip("no node here")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, tmp_path)
    script = Path(__file__).parent / "findings.mjs"
    done = subprocess.run(
        [node, script, tmp_path], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
