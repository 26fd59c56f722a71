"""The dashboard in Chromium, looked at as a person does who has a viewer's join line.

The fleet is scripted: real links and messages of 50 replicas, some of which misbehave. Pictures are
kept where DASHBOARD_PICTURES says, else in pytest's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess  # noqa: TID251 - a browser's driver
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Agent
from fakes.scripted_fleet import ScriptedSite, scripted_site
from fakes.scripted_past import Script

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PATIENCE_S = 20
SCRIPTS = (
    Script(
        run="math-7b",
        replicas=50,
        past_steps=1200,
        past_syncs=30,
        step_s=2.0,
        rollouts=96,
        straggler="r17",
        refuses=["r31"],
        fails=["r08"],
        joining=["r49", "r50"],
        draining=["r40"],
        lost=["r22"],
        skewed=["r09"],
    ),
    Script(
        run="code-1b",
        replicas=3,
        bound="trainer",
        trl_version="1.18.0",
        past_steps=400,
        past_syncs=10,
        speed=0.2,
        max_steps=2000,
        ratio=1.05,
    ),
    Script(run="pilot", past_steps=300, max_steps=300, bound="sync", finished="all steps are done"),
)
PANELS = ["answers", "verdict", "alerts", "metrics", "replicas", "syncs", "routing", "events"]
CHECKS = [
    *("login", "runs", "run", "live", "notes"),
    *PANELS,
    *("filterOfReplicas", "focus", "light", "dark", "keyboard", "phone"),
    *("rollouts", "outage", "faults"),
]


def needed(name: str) -> str:
    """A program, or a skipped test; in CI nothing is skipped."""
    found = shutil.which(name)
    if found and (HERE / "node_modules").is_dir():
        return found
    if "CI" in os.environ:
        pytest.fail(f"CI must have {name} and the packages of tests/web: see .ci/run")
    pytest.skip(f"no {name} here, or no packages in tests/web (npm ci)")


def look(
    url: str,
    joins: list[str],
    folder: Path,
    checks: list[str],
    asked: Callable[[str], None] | None = None,
) -> dict[str, str]:
    """What the browser says of each check, "" if all is well; `asked` does what it cannot do."""
    pictures = os.environ.get("DASHBOARD_PICTURES", str(folder / "pictures"))
    lines = folder / "viewer.joins"
    lines.write_text("\n".join(joins) + "\n")
    program = [needed("node"), str(HERE / "page.mjs"), needed("chromium")]
    command = [*program, url, pictures, str(lines), *checks]
    found: dict[str, str] = {}
    with (
        (folder / "browser.err").open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as browser,
    ):
        assert browser.stdin is not None
        assert browser.stdout is not None
        try:
            for line in browser.stdout:
                told = json.loads(line)
                if "ask" in told:
                    assert asked is not None, told
                    asked(told["ask"])
                    browser.stdin.write("done\n")
                    browser.stdin.flush()
                else:
                    found[told["check"]] = told["word"]
            browser.wait(PATIENCE_S)
        finally:
            browser.kill()
    assert browser.returncode == 0, (folder / "browser.err").read_text()
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSite]:
    needed("chromium")
    with scripted_site(tmp_path_factory.mktemp("fleet"), SCRIPTS) as made:
        yield made


@pytest.fixture(scope="module")
def seen(site: ScriptedSite) -> dict[str, str]:
    """All checks in one browser: it and the fleet take longer to start than to look at."""
    proxies: list[Agent] = [site.proxy()]
    proxies[0].wait_for(r"run=math-7b replica=r08 before=READY after=SUSPECT")

    def asked(what: str) -> None:
        if what == "stop the proxy":
            proxies[-1].end()
        else:
            proxies.append(site.proxy())

    joins = [site.viewer(), site.viewer("math-7b", rollouts=True)]
    return look(f"https://{site.address}/", joins, site.hosts.folder, CHECKS, asked)


@pytest.mark.parametrize("check", CHECKS)
def test_the_page(seen: dict[str, str], check: str) -> None:
    assert seen[check] == ""


@pytest.mark.deep
def test_a_viewer_sees_a_run_of_real_agents(tmp_path: Path) -> None:
    needed("chromium")
    with fleet.site(tmp_path) as agents:
        agents.proxy()
        for name in ("r1", "r2"):
            agents.replica(name)
        agents.join_file("viewer", "viewer.join")
        trainer = agents.trainer(10_000, "--min-replicas=2", "--set=train.fake_step_s=0.5")
        trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
        join = (tmp_path / "viewer.join").read_text().strip()
        checks = ["login", "live", "light", "dark", "phone", "faults"]
        found = look(f"https://{agents.address}/", [join, join], tmp_path, checks)
        assert found == dict.fromkeys(checks, "")
