"""A fleet of frozen agents with fake engines: what children see, and what a loss leaves behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Agent, Site, processes_naming
from fakes.frozen import built
from fakes.processes import children_naming, rss_mib

pytestmark = pytest.mark.slow

IDLE_MAX_MIB = 80.0
ENGINE_READY = "engine.state ready=True"


@pytest.fixture(params=["one-file", pytest.param("one-folder", marks=pytest.mark.deep)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    program = built(request.param)
    with fleet.site(tmp_path) as made:
        made.hosts.program = [str(program)]
        yield made
        for agent in made.hosts.agents:  # by SIGTERM, because a killed one's guard takes 10 s
            if agent.process.poll() is None:
                agent.end()


def agent_pids(agent: Agent) -> list[int]:
    """The process that was started, and the one that a one-file unpacked."""
    inner = children_naming(agent.process.pid, "--role")
    return [agent.process.pid, *inner]


def engine_environment(agent: Agent) -> dict[str, str]:
    (engine,) = children_naming(agent_pids(agent)[-1], "fakes.vllm")
    entries = Path(f"/proc/{engine}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_a_run_survives_a_restart_of_the_proxy(site: Site) -> None:
    proxy = site.proxy()
    replica = site.replica("r1")
    trainer = site.trainer(12, "--set=train.fake_rollouts=8")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    proxy.end(signal.SIGKILL)
    site.proxy()
    assert trainer.process.wait(60) == 0, trainer.text()
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 12)
    assert replica.process.wait(20) == 0
    assert replica.text().count("link.up") >= 2


def test_an_engine_sees_nothing_of_the_frozen_program(site: Site) -> None:
    site.proxy()
    libraries = "/usr/local/cuda/lib64"
    replica = site.replica("r1", env={"LD_LIBRARY_PATH": libraries})
    replica.wait_for(ENGINE_READY)
    env = engine_environment(replica)
    assert env["LD_LIBRARY_PATH"] == libraries
    assert not [name for name in env if name.startswith(("_PYI", "_MEI", "PYINSTALLER", "ASYNC"))]
    other = site.replica("r2")
    other.wait_for(ENGINE_READY)
    assert "LD_LIBRARY_PATH" not in engine_environment(other)


def test_an_idle_replica_is_small(site: Site) -> None:
    site.proxy()
    replica = site.replica("r1")
    replica.wait_for(ENGINE_READY)
    agent = agent_pids(replica)[-1]
    workers = children_naming(agent, "mount-worker")
    held = {pid: rss_mib(pid) for pid in (*agent_pids(replica), *workers)}
    print(f"idle replica: {held[agent]:.1f} MiB, with all: {held}")  # noqa: T201 - by pytest -s
    assert held[agent] < IDLE_MAX_MIB, held


def test_sigkill_of_a_replica_takes_its_engine_along(site: Site) -> None:
    site.proxy()
    replica = site.replica("r1")
    replica.wait_for(ENGINE_READY)
    replica.end(signal.SIGKILL)
    replica_dir = f"{site.folder}/r1"
    deadline = time.monotonic() + 15
    while left := [line for line in processes_naming(replica_dir) if "/proxy" not in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock
