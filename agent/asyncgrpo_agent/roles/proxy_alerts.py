"""Alerts about the proxy's runs: looked for every few seconds, logged and told when they begin.

What is wrong is decided in `core.alerts`; here it is collected, kept with its run and told to all
who look on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.config.sections import Alerts
from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.alerts import Alert, Limits, ReplicaFacts, RunFacts, look
from asyncgrpo_agent.core.slots import slots_fault
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_links import ReplicaLink
from asyncgrpo_agent.roles.proxy_run import ProxyRun, Runs

log = Log(__name__)

EVERY_S: Final = 2.0
NEWEST_SYNCS: Final = 20


@dataclass(frozen=True, slots=True)
class AlertDesk:
    """Of one proxy."""

    config: Alerts
    runs: Runs

    async def serve(self) -> None:
        """For ever."""
        limits = Limits(**msgspec.structs.asdict(self.config))
        while True:
            await trio.sleep(EVERY_S)
            for run in list(self.runs.values()):
                look_at(run, limits, trio.current_time())


def look_at(run: ProxyRun, limits: Limits, now: float) -> None:
    """Update the alerts of one run. A run that is over keeps none."""
    found = [] if run.finished else look(_facts(run, now), limits)
    raised, over = run.alerts.update(found, now_s=now, now_unix_s=run.story.unix_time_s())
    for one in raised:
        told = {"run": run.name, "kind": one.kind, "subject": one.subject or run.name}
        log.warning("alert.raised", **told, reason=one.sentence, fix=one.fix)
        run.story.say(
            *("alert", one.severity, "alert.raised", f"{one.sentence} {one.fix}"),
            replica=one.subject or None,
            fields={"kind": one.kind, "value": one.value, "limit": one.limit},
        )
    for one in over:
        log.info("alert.over", run=run.name, kind=one.kind, subject=one.subject or run.name)
        run.story.say(
            *("alert", "info", "alert.over", f"No longer: {one.sentence}"),
            replica=one.subject or None,
            fields={"kind": one.kind},
            duration_s=_stood_s(run, one),
        )


def _stood_s(run: ProxyRun, alert: Alert) -> float:
    return max(0.0, run.story.unix_time_s() - alert.since_unix_s)


def _facts(run: ProxyRun, now: float) -> RunFacts:
    story = run.story.story
    retried = run.retries.retried
    answered = run.routed.total() - retried  # counts of replicas go with those that leave
    announced = (one.adapter for one in run.known.values())
    return RunFacts(
        steps=[row.values for row in story.recent],
        syncs=story.syncs.find(limit=NEWEST_SYNCS),
        replicas=[_replica(link, run) for link in run.links.values()],
        announced={
            parts.version: parts.digest
            for one in announced
            if one.attempt == run.attempt and (parts := parse_name(one.name)) is not None
        },
        tries_per_success=run.tries.read(retried, answered, now),
    )


def _replica(link: ReplicaLink, run: ProxyRun) -> ReplicaFacts:
    version, effect = link.effect or (-1, None)
    offered, fault = link.offered, None
    if offered is not None:
        fault = slots_fault(run.terms.max_staleness, offered.max_loras, offered.max_cpu_loras)
    named = (parse_name(name) for name in link.replica.loaded)
    return ReplicaFacts(
        name=link.replica.name,
        skew_s=link.skew_s,
        loaded={p.version: p.digest for p in named if p is not None and p.attempt == run.attempt},
        effect=effect,
        effect_version=version,
        slots_fault=fault or "",
    )
