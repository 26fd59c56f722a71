"""The proxy raises alerts about a run, tells whoever looks on, and takes them back."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.alerts import CLEAR_AFTER_S, Limits
from asyncgrpo_agent.roles import proxy_alerts
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, ReplicaLink
from asyncgrpo_agent.roles.proxy_snapshot import live_snapshot
from asyncgrpo_agent.wire import messages as m
from fakes.links import unstarted_pair

ATTEMPT = "a0001-56f0"


def adapter(version: int, digest: str) -> m.Adapter:
    return m.Adapter(f"demo.{ATTEMPT}.v{version:06d}.{digest[:12]}", ATTEMPT, version, digest)


def joined(run: ProxyRun, name: str) -> ReplicaLink:
    replica = run.fleet.join(name, "i", 8, trio.current_time())
    near, _, _ = unstarted_pair()
    link = ReplicaLink(replica=replica, link=near, control=cast("ProxyChannel", None))
    run.links[name] = link
    return link


def look(run: ProxyRun) -> list[tuple[str, str]]:
    proxy_alerts.look_at(run, Limits(), trio.current_time())
    return [(one.kind, one.subject) for one in run.alerts.alerts]


def names(run: ProxyRun) -> list[str]:
    found = run.story.story.events.find(kind="alert")
    return [event.name for event in reversed(found)]


async def test_a_replica_that_serves_other_bytes_is_told_until_it_does_not(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    run = ProxyRun("demo", attempt=ATTEMPT)
    link = joined(run, "r1")
    right, wrong = adapter(3, "a" * 64), adapter(3, "b" * 64)
    run.known[right.name] = m.Announce(right, "c3", [right.name])
    link.replica.loaded = frozenset([right.name])
    assert look(run) == []
    link.replica.loaded = frozenset([wrong.name])
    assert look(run) == [("wrong-digest", "r1")]
    assert look(run) == [("wrong-digest", "r1")]
    assert names(run) == ["alert.raised"]
    shown: Any = live_snapshot(run, trio.current_time())["alerts"][0]
    assert "aaaaaaaaaaaa" in shown.sentence
    assert "bbbbbbbbbbbb" in shown.sentence
    link.replica.loaded = frozenset([right.name])
    await trio.sleep(CLEAR_AFTER_S)
    assert look(run) == []
    assert names(run) == ["alert.raised", "alert.over"]
    assert [r.message for r in caplog.records if r.message.startswith("alert.")] == ["alert.raised"]


async def test_what_a_replica_reports_of_its_clock_and_its_adapters(
    autojump_clock: MockClock,
) -> None:
    run = ProxyRun("demo", attempt=ATTEMPT)
    link = joined(run, "r1")
    link.skew_s, link.effect = 7.5, (12, 0.0)
    assert look(run) == [("no-effect", "r1"), ("clock-skew", "r1")]
    run.finished = "all steps are done"
    await trio.sleep(CLEAR_AFTER_S)
    assert look(run) == []


async def test_a_replica_that_leaves_with_its_counts_makes_no_retries(
    autojump_clock: MockClock,
) -> None:
    run = ProxyRun("demo", attempt=ATTEMPT)
    link = joined(run, "r1")
    link.replica.requests = 1000
    run.routed["affinity"] = 1000
    assert look(run) == []
    run.leave(link, "a spot box", trio.current_time())
    run.routed["affinity"] += 1100
    run.retries.retried += 30
    assert look(run) == []
    run.routed["affinity"] += 1000
    run.retries.retried += 500
    assert look(run) == [("retries", "")]
