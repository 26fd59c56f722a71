"""Names of a fleet at work: a stolen token, a box with an empty disk, two processes of one host."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Site
from fakes.relay import Relay

pytestmark = pytest.mark.slow

SLOW = ("--", "--fake-tokens-per-s=100")
LOAD = ("--set=train.fake_rollouts=16", "--set=train.fake_tokens=30")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def test_a_stolen_token_pushes_nobody_out_and_no_rollout_is_lost(site: Site) -> None:
    proxy = site.proxy()
    first = site.replica("r1", *SLOW)
    trainer = site.trainer(12, *LOAD)
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    thief = site.replica("r1", f"--state-dir={site.folder}/thief", *SLOW)
    proxy.wait_for("replica.renamed run=demo replica=r1-2 wanted=r1 .*another host key")
    thief.wait_for("replica.renamed name=r1-2 wanted=r1")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert first.process.wait(20) == 0
    assert thief.process.wait(20) == 0
    assert site.counts() == {"rollouts": 192, "failed": 0, "wrong_bytes": 0, "steps": 12}
    assert "replica.evicted_ghost" not in proxy.text()
    assert "rollout.retried" not in proxy.text()
    assert first.text().count("link.up") == 1


def test_a_box_with_an_empty_disk_joins_at_once_and_its_ghost_leaves_by_liveness(
    site: Site,
) -> None:
    proxy = site.proxy()
    with Relay(site.address) as relay:
        first = site.replica("r1", f"--proxy={relay.address}", *SLOW)
        trainer = site.trainer(6, "--min-replicas=2", *LOAD)  # the ghost and the new one
        trainer.wait_for("replicas.awaited ready=1")
        relay.hold(up=True, down=True)
        first.end(signal.SIGKILL)
        respawned = site.replica("r1", f"--state-dir={site.folder}/empty", *SLOW)
        proxy.wait_for("replica=r1-2 before=JOINING after=READY")
        assert not re.search("replica=r1 before=.* after=GONE", proxy.text())
        proxy.wait_for("replica=r1 before=READY after=GONE")
        assert trainer.process.wait(60) == 0, trainer.text()
        assert respawned.process.wait(20) == 0
    assert site.counts() == {"rollouts": 96, "failed": 0, "wrong_bytes": 0, "steps": 6}
    assert "replica.evicted_ghost" not in proxy.text()


def test_two_processes_of_one_host_and_a_proxy_that_restarts(site: Site) -> None:
    proxy = site.proxy()
    older = site.replica("r1")
    proxy.wait_for("replica=r1 before=JOINING after=READY")
    newer = site.replica("r1")
    older.wait_for("link.lost .*two processes have the host key of 'r1'.*another replica.name")
    proxy.wait_for("(?s)evicted_ghost.*replica=r1 before=JOINING after=READY")
    bindings = json.loads((site.folder / "proxy" / "proxy" / "hosts.json").read_text())
    assert list(bindings["demo"]) == ["r1"]
    proxy.end(signal.SIGKILL)
    again = site.proxy()
    again.wait_for("joined run=demo replica=r1 ")
    stranger = site.replica("r1", f"--state-dir={site.folder}/other")
    again.wait_for("joined run=demo replica=r1-2 ")
    assert proxy.text().count("replica.evicted_ghost") == 1
    assert "replica.evicted_ghost" not in again.text()
    assert older.process.poll() is None, "it waits for its turn"
    assert [agent.end() for agent in (older, newer, stranger)] == [0, 0, 0]
