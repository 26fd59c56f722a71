"""TRL dies in the middle of a run, and its agent starts it again by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def records(site: Site, kind: str) -> list[dict[str, Any]]:
    history = site.folder / "trainer" / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


def test_a_crash_costs_the_steps_since_the_last_checkpoint(site: Site) -> None:
    proxy, replica = site.proxy(), site.replica("r0")
    trainer = site.trainer(8, "--set=train.save_steps=2", "--set=train.fake_crash_at=5")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert replica.process.wait(20) == 0
    assert replica.text().count("child.started child=vllm") == 1
    (again,) = records(site, "restarting")
    assert "exit code 70" in again["reason"]
    (resumed,) = records(site, "resumed")
    assert resumed["step"] == 4
    steps = (site.folder / "trainer" / "output" / "demo" / "steps.txt").read_text().split()
    assert [int(step) for step in steps] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert site.counts()["wrong_bytes"] == 0
    assert re.findall(r"run\.ended .*ok=(\w+)", proxy.text()) == ["True"], proxy.text()


def test_none_is_started_again_if_that_is_not_wanted(site: Site) -> None:
    proxy = site.proxy()
    site.replica("r0")
    trainer = site.trainer(8, "--set=train.fake_crash_at=5", "--set=trainer.restarts=0")
    assert trainer.process.wait(60) == 1
    assert "trainer.restarts is 0" in trainer.text()
    assert "exit code 70" in trainer.text()
    assert records(site, "restarting") == []
    proxy.wait_for(r"run\.ended .*ok=False")
