"""Hosts that leave a fleet by command, for want of work or with their run: whole agents."""

import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Agent, Site

pytestmark = pytest.mark.slow

SLOW = ("--", "--fake-tokens-per-s=60")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def stop_call(site: Site, name: str) -> str:
    """The flag for a platform's stop call that notes who was stopped, and in what environment."""
    program = site.folder / "stop-host"
    program.write_text('#!/bin/sh\nenv > "$1"\n')
    program.chmod(stat.S_IRWXU)
    noted = site.folder / f"{name}.stopped"
    return f'--set=replica.on_exit_command=["{program}", "{noted}"]'


def stopped(site: Site) -> set[str]:
    return {path.stem for path in site.folder.glob("*.stopped")}


def drain(site: Site, name: str, *more: str) -> Agent:
    return site.hosts.start("drain", "drain", name, f"--state-dir={site.folder}/proxy", *more)


def test_a_replica_is_drained_under_load_and_the_rest_end_with_the_run(site: Site) -> None:
    proxy = site.proxy()
    price = "--set=replica.price_per_hour=3600"  # one a second
    secret = {"ASYNCGRPO_ENGINE_DTYPE": "auto", "AWS_SESSION_TOKEN": "hush"}
    first = site.replica("r1", price, stop_call(site, "r1"), *SLOW, env=secret)
    second = site.replica("r2", stop_call(site, "r2"), *SLOW)
    trainer = site.trainer(12, "--min-replicas=2", "--set=train.fake_rollouts=16")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    order = drain(site, "r1", "--wait")
    assert order.process.wait(20) == 0, order.text()
    assert re.match(r"replica r1 of run demo drains", order.text())
    assert order.text().endswith("replica r1 of run demo has gone\n")
    assert first.process.wait(20) == 0
    assert 'replica.stopped reason="drained by command"' in first.text()
    assert "replica.cut" not in first.text()
    assert stopped(site) == {"r1"}
    seen = (site.folder / "r1.stopped").read_text()
    assert "ASYNCGRPO_" not in seen
    assert "hush" not in seen
    assert "replica=r1 before=READY after=DRAINING" in proxy.text()
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts() == {"rollouts": 192, "failed": 0, "wrong_bytes": 0, "steps": 12}
    assert second.process.wait(20) == 0
    assert stopped(site) == {"r1", "r2"}
    ended = proxy.wait_for(
        r"run\.ended run=demo ok=True .*replica_hours=(\S+) unpriced_hours=(\S+) cost=(\S+)"
    )
    hours, unpriced_hours, cost = map(float, ended.groups())
    assert 0 < unpriced_hours < hours
    assert cost == pytest.approx((hours - unpriced_hours) * 3600, rel=0.05)
    gone = drain(site, "r1")
    assert gone.process.wait(20) == 1
    assert "there is no replica 'r1'. None is registered now" in gone.text()


def test_a_replica_without_work_goes_and_one_that_gets_a_signal_stops_no_host(site: Site) -> None:
    proxy = site.proxy()
    idle = site.replica("idle", "--set=replica.idle_exit_s=2", stop_call(site, "idle"))
    signalled = site.replica("signalled", stop_call(site, "signalled"))
    signalled.wait_for("engine.state ready=True")
    assert idle.process.wait(30) == 0, idle.text()
    assert re.search(r"(?s)ready=True.*replica.draining reason=\"no rollout came", idle.text())
    proxy.wait_for('replica=idle before=READY after=DRAINING reason="no rollout came for 2 s"')
    assert "on_exit.called" in idle.text()
    assert signalled.end(signal.SIGTERM) == 0
    assert stopped(site) == {"idle"}


def test_a_stop_call_that_fails_changes_no_exit_code(site: Site) -> None:
    site.proxy()
    replica = site.replica("r1", '--set=replica.on_exit_command=["/nowhere/stop"]')
    replica.wait_for("engine.state ready=True")
    order = drain(site, "r1", "--run=demo")
    assert order.process.wait(20) == 0, order.text()
    assert replica.process.wait(20) == 0
    assert "ERROR on_exit.failed" in replica.text()


def test_a_stop_call_that_has_the_agent_stopped_ends_well(site: Site) -> None:
    site.proxy()
    call = "kill -TERM $PPID; sleep 300"  # as a platform that stops the host at once
    replica = site.replica("r1", f'--set=replica.on_exit_command=["sh", "-c", "{call}"]')
    replica.wait_for("engine.state ready=True")
    assert drain(site, "r1").process.wait(20) == 0
    assert replica.process.wait(20) == 0
    assert "on_exit.stopped signal=SIGTERM" in replica.text()


def test_a_replica_whose_platform_gives_notice_drains_as_by_a_signal(site: Site) -> None:
    site.proxy()
    notice = site.folder / "notice"
    replica = site.replica(
        "r1",
        f'--set=replica.notice_command=["test", "-e", "{notice}"]',
        "--set=replica.notice_every_s=1",
        stop_call(site, "r1"),
    )
    replica.wait_for("engine.state ready=True")
    notice.touch()
    assert replica.process.wait(20) == 0, replica.text()
    assert 'replica.stopped reason="the platform gives notice' in replica.text()
    assert stopped(site) == set()
