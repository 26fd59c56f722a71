"""How loud the proxy is about a replica that is lost."""

from __future__ import annotations

import pytest
import trio

from asyncgrpo_agent.core.replicas import drain, engine_up
from asyncgrpo_agent.roles.proxy_run import ProxyRun


def ready(run: ProxyRun, name: str) -> None:
    replica = run.fleet.join(name, "i", 4, trio.current_time())
    run.note(engine_up(replica, trio.current_time()))


def lose(run: ProxyRun, name: str) -> None:
    run.note(run.fleet.leave(name, "i", trio.current_time(), "link ended"))


async def test_one_of_two_warns_the_last_is_an_error_and_one_that_drained_is_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run = ProxyRun("demo")
    ready(run, "r1")
    ready(run, "r2")
    lose(run, "r1")
    lose(run, "r2")
    ready(run, "r3")
    run.note(drain(run.fleet.replicas["r3"], "asked to", trio.current_time()))
    lose(run, "r3")
    levels = [r.levelname for r in caplog.records if r.message == "replica.state"]
    assert levels == ["INFO", "INFO", "WARNING", "ERROR", "INFO", "INFO", "INFO"]
    told = [event.severity for event in reversed(run.story.story.events.find())]
    assert told == [level.lower() for level in levels]
    newest = run.story.story.events.find(text="no replica is ready now")
    assert [event.replica for event in newest] == ["r2"]
