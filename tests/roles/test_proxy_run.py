"""How loud the proxy is about a replica that is lost."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.replicas import drain, engine_up
from asyncgrpo_agent.core.retention import NAMED_S
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.wire import messages as m


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


def adapter(version: int) -> m.Adapter:
    digest = f"{version:064x}"
    name = f"demo.a0001-56f0.v{version:06d}.{digest[-12:]}"
    return m.Adapter(name, "a0001-56f0", version, digest)


async def test_a_retired_version_is_known_for_as_long_as_rollouts_name_it(
    autojump_clock: MockClock,
) -> None:
    run, versions = ProxyRun("demo", attempt="a0001-56f0"), [adapter(n) for n in range(60)]
    names = [one.name for one in versions]

    async def publish(version: int) -> None:
        live = names[max(0, version - 2) : version + 1]
        message = m.Published(versions[version], f"c{version}", live, 0.5, 5.0, 1, {})
        await run.publish(message)
        await run.retire(m.Retired([], live))

    for version in range(40):
        await publish(version)
        if version >= 3:
            await run.ask_for(names[1])
    assert names[1] in run.known
    assert names[2] not in run.known
    forgotten, coming = parse_name(names[0]), parse_name(names[59])
    assert forgotten is not None
    assert coming is not None
    assert run.has_forgotten(forgotten)
    assert not run.has_forgotten(coming)
    await trio.sleep(NAMED_S + 1)
    await publish(40)
    assert names[1] not in run.known
