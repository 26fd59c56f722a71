"""A fleet whose model comes from a hub: with fake engines, and the hub's own library."""

from __future__ import annotations

import json
import re
import shutil
import subprocess  # noqa: TID251 - commands are run as a user runs them
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import fleet
from fakes import hub as hubs
from fakes.fleet import Site
from fakes.hub import MODEL, TOKEN, Hub, tiny_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LARGE = 24_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hubs.served() as served:
        yield served


@pytest.fixture
def site(tmp_path: Path, engine_python: str) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        fleet.engine_python(tmp_path, hub_python=engine_python)
        shutil.rmtree(tmp_path / "tiny")
        made.model = ()
        yield made


def variables(hub: Hub, home: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
    }


def replicas(site: Site) -> list[dict[str, Any]]:
    told = json.loads(command(site, "status", "--join=viewer.join", "--json"))
    rows: list[dict[str, Any]] = told["replicas"]
    return rows


def command(site: Site, *words: str) -> str:
    """What a command says that may end with 1, as a fleet that is not ready does."""
    argv = [sys.executable, "-m", "asyncgrpo_agent", *words]
    env = {"PYTHONPATH": str(fleet.ROOT / "agent"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=site.folder)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def reason_of(site: Site, name: str, pattern: str) -> str:
    """The reason that status shows of a replica that is JOINING, once it is of that kind."""
    deadline = time.monotonic() + fleet.PATIENCE_S
    while True:
        for row in replicas(site):
            is_it = (row["name"], row["state"]) == (name, "JOINING")
            if is_it and re.search(pattern, row["reason"]):
                return str(row["reason"])
        assert time.monotonic() < deadline, replicas(site)
        time.sleep(0.1)  # noqa: TID251 - other processes have no virtual clock


def test_a_replica_with_nothing_but_its_join_loads_the_commit_that_is_trained(
    site: Site, hub: Hub
) -> None:
    first = hub.commit(tiny_files(1, weight_bytes=LARGE))
    hub.needs_token = True
    site.join_file("viewer", "viewer.join")
    site.proxy()
    home = site.folder / "replica-hf"
    early = site.replica("early", env=variables(hub, home))
    early.wait_for("link.up")
    reason_of(site, "early", "waiting for the trainer of run demo")
    trainer = site.trainer(
        *(3, f"--model-id={MODEL}", "--min-replicas=2", "--set=train.lora.r=24"),
        env=variables(hub, site.folder / "trainer-hf"),
    )
    trainer.wait_for(f"model.chosen model={MODEL} commit={first}")
    hub.gate.clear()  # and the replica's download stands at its half
    reason_of(site, "early", r"loading acme/tiny: 10\.5 of 24\.0 MB")
    looked = command(
        site,
        *("doctor", "--role=replica", "--json", "--join=replica.join", f"--model-id={MODEL}"),
        *(f"--state-dir={site.folder}/early", f"--bucket={site.folder}/bucket"),
        f"--engine-python={site.folder}/fake-python",
    )
    rows = {row["what"]: row["found"] for row in json.loads(looked)}
    assert rows["model acme/tiny"] == "loading, 10.5 of 24.0 MB"
    second = hub.commit(tiny_files(2, weight_bytes=LARGE))  # the branch moves on
    hub.gate.set()
    early.wait_for("vLLM is up")
    late = site.replica("late", f"--model-id={MODEL}", env=variables(hub, site.folder / "late-hf"))
    late.wait_for("vLLM is up")
    assert trainer.process.wait(60) == 0, trainer.text()
    for agent in (early, late):
        assert agent.process.wait(30) == 0, agent.text()
        assert f"model.loaded model={MODEL} commit={first}" in agent.text()
    assert first != second
    # It was shown to the hub, and is written nowhere.
    assert hub.tokens == {TOKEN}
    written = [path for path in site.folder.rglob("*") if path.is_file() and "-hf" not in str(path)]
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []


def test_a_run_that_goes_on_keeps_its_commit_also_on_another_host(site: Site, hub: Hub) -> None:
    first = hub.refs["main"]
    site.proxy()
    for attempt, state in enumerate(("host-a", "host-b")):
        trainer = site.trainer(
            *(2 + attempt, f"--model-id={MODEL}", f"--state-dir={site.folder}/{state}"),
            f"--set=train.output_dir={site.folder}/{state}-out",
            env=variables(hub, site.folder / f"{state}-hf"),
        )
        trainer.wait_for("link.up")  # a run that is over has no use for replicas
        replica = site.replica(f"r{attempt}", env=variables(hub, site.folder / "r-hf"))
        assert trainer.process.wait(60) == 0, trainer.text()
        assert f"model.chosen model={MODEL} commit={first}" in trainer.text()
        assert replica.process.wait(30) == 0, replica.text()
        hub.commit(tiny_files(9))
