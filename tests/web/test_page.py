"""The dashboard of a proxy at work, in Chromium: a person logs in and looks on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess  # noqa: TID251 - a browser's driver
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PATIENCE_S = 90


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.proxy()
        for name in ("r1", "r2"):
            made.replica(name)
        yield made


def needed(name: str) -> str:
    """A program, or a skipped test; in CI nothing is skipped."""
    found = shutil.which(name)
    if found and (HERE / "node_modules").is_dir():
        return found
    if "CI" in os.environ:
        pytest.fail(f"CI must have {name} and the packages of tests/web: see .ci/run")
    pytest.skip(f"no {name} here, or no packages in tests/web (npm ci)")


def looked_at(site: Site, pictures: Path) -> dict[str, Any]:
    """What a browser saw."""
    program = [needed("node"), str(HERE / "page.mjs"), needed("chromium")]
    words = [f"https://{site.address}/", str(site.folder / "viewer.join"), str(pictures)]
    done = subprocess.run(
        [*program, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_a_viewer_sees_a_run_live(site: Site, tmp_path: Path) -> None:
    needed("chromium")
    site.join_file("viewer", "viewer.join")
    trainer = site.trainer(10_000, "--min-replicas=2", "--set=train.fake_step_s=0.5")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    seen = looked_at(site, tmp_path / "pictures")
    assert {"Training", "Replicas", "Syncs", "Routing", "Events"} <= {
        text.split("\n")[0] for text in seen["headings"]
    }
    assert seen["replicas"] == 2
    assert 0 < seen["steps"][0] < seen["steps"][1], "it is live"
    assert seen["overflow"] <= 0, "a phone need not scroll sideways"
    assert seen["focused"] not in (None, "BODY"), "the keyboard gets somewhere"
    assert (seen["console"], seen["failed"], seen["foreign"], seen["serious"]) == ([], [], [], [])
