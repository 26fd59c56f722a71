"""A fleet that is upgraded while it works: install.sh, then one host after the other."""

from __future__ import annotations

import os
import signal
import subprocess  # noqa: TID251 - scripts are run as a user runs them
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.archives import packed, unpacked
from fakes.fleet import Agent, Site
from fakes.frozen import built

pytestmark = pytest.mark.deep

REPLICAS = ("r1", "r2", "r3")
SLOW = ("--", "--fake-tokens-per-s=40")
ROLLOUTS, TOKENS = 12, 40  # a step has a dozen rollouts, of a second each
ENDLESS = 100_000


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        current = tmp_path / "host/opt/asyncgrpo-agent/current"
        made.hosts.program = [str(current / "agent/asyncgrpo-agent")]
        yield made
        for agent in made.hosts.agents:  # by SIGTERM, because a killed one's guard takes 10 s
            if agent.process.poll() is None:
                agent.end()


def install(site: Site, version: str) -> None:
    archive = packed(site.folder / "dist", built("one-folder").parent, version)
    folder = unpacked(archive, site.folder)
    argv = [str(folder / "install.sh"), "--root", str(site.folder / "host")]
    subprocess.run(argv, check=True, capture_output=True)


def version_of(agent: Agent) -> str:
    """By the file that it runs from."""
    program = os.readlink(f"/proc/{agent.process.pid}/exe")
    return program.partition("/versions/")[2].partition("/")[0]


def start_replica(site: Site, name: str) -> Agent:
    replica = site.replica(name, *SLOW)
    replica.wait_for("engine.state ready=True")
    return replica


def test_no_rollout_fails_while_replicas_and_proxy_are_upgraded(site: Site) -> None:
    install(site, "1.0")
    proxy = site.proxy()
    before = {name: start_replica(site, name) for name in REPLICAS}
    enough = site.folder / "enough"
    trainer = site.trainer(
        ENDLESS,
        "--min-replicas=3",
        f"--set=train.fake_rollouts={ROLLOUTS}",
        f"--set=train.fake_tokens={TOKENS}",
        f"--set=train.fake_until={enough}",
    )
    trainer.wait_for(r"adapter.published adapter=\S+\.v000002")
    install(site, "1.1")
    assert {version_of(agent) for agent in (proxy, trainer, *before.values())} == {"1.0"}
    after = {}
    for name in REPLICAS:
        assert before[name].end(signal.SIGTERM) == 0, before[name].text()
        assert "replica.cut" not in before[name].text()  # what it had begun it has ended
        after[name] = start_replica(site, name)
        proxy.wait_for(rf"(?s)(replica={name} before=JOINING after=READY.*){{2}}")
    assert proxy.end(signal.SIGTERM) == 0, proxy.text()
    proxy = site.proxy()
    assert {version_of(agent) for agent in (proxy, *after.values())} == {"1.1"}
    for replica in after.values():
        replica.wait_for("(?s)(link.up.*){2}")
    published = trainer.text().count("adapter.published")
    trainer.wait_for(f"(?s)(adapter.published.*){{{published + 2}}}")
    enough.touch()
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"]) == (0, 0)
    assert [replica.process.wait(30) for replica in after.values()] == [0, 0, 0]
