"""One run as people are shown it: runs, replicas, routing, verdict, the newest syncs.

Everything here is read from the proxy's state in one go and handed out as plain values for JSON;
None stands for what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.core import trl_metrics
from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.core.verdict import FleetFacts, Verdict, judge
from asyncgrpo_agent.roles.proxy_links import ReplicaLink
from asyncgrpo_agent.roles.proxy_run import ProxyRun

NEWEST_SYNCS: Final = 40
NEWEST_EVENTS: Final = 200
LOST_WITHIN_S: Final = 300.0
REWARD_STEPS: Final = 10


def run_row(run: ProxyRun, now: float) -> dict[str, Any]:
    """One line in the list of runs."""
    run.charge(now)
    story = run.story.story
    newest = list(story.recent)[-REWARD_STEPS:]
    rewards = [
        value
        for row in newest
        if (value := trl_metrics.value_of(row.values, trl_metrics.REWARD)) is not None
    ]
    return {
        "name": run.name,
        "attempt": run.attempt,
        "state": _state(run),
        "trainer": run.trainer is not None,
        "since_unix_s": story.started_unix_s or None,
        "step": story.step,
        "max_steps": story.max_steps or None,
        "phase": story.phase or None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "ratio_by_class": trl_metrics.mean_ratios([row.values for row in newest]),
        "ready": sum(replica.state is State.READY for replica in run.fleet),
        "registered": len(run.links),
        "cost": run.usage.cost,
        "replica_hours": run.usage.replica_hours,
        "verdict": verdict_of(run),
    }


def _state(run: ProxyRun) -> str:
    story = run.story.story
    if run.finished or (story.finished and not story.failed):
        return "finished"
    if run.trainer is None:
        return "failed" if story.failed else "waiting"
    return "running" if story.step else "waiting"


def verdict_of(run: ProxyRun) -> Verdict:
    story = run.story.story
    since_unix_s = run.story.unix_time_s() - LOST_WITHIN_S
    gone = {
        event.replica
        for event in story.events.find(kind="replica", limit=NEWEST_EVENTS)
        if event.t_unix_s >= since_unix_s
        and event.severity == "warning"
        and event.fields.get("after") == State.GONE.value
        and event.replica not in run.links
    }
    states = [replica.state for replica in run.fleet]
    facts = FleetFacts(
        registered=len(run.links),
        ready=states.count(State.READY),
        suspect=states.count(State.SUSPECT),
        gone=len(gone),
        waiting=run.holding.waiting,
    )
    done = "" if story.failed else run.finished or story.finished
    return judge([row.values for row in story.recent], story.limits, facts, finished=done)


def measured(run: ProxyRun, now: float) -> dict[str, float]:
    """What the proxy sees itself, kept beside TRL's metrics of each step."""
    replicas = list(run.fleet)
    syncs = run.story.story.syncs.find(limit=1)
    took_s = syncs[0].quorum_s if syncs else None
    values = {
        "agrpo/paused_s": sum(replica.paused_s for replica in replicas),
        "agrpo/held": float(run.holding.waiting),
        "agrpo/in_flight": float(sum(replica.in_flight for replica in replicas)),
        "agrpo/tokens_per_s": sum(r.tokens_per_s for r in replicas if r.state is State.READY),
    }
    return values if took_s is None else values | {"agrpo/sync_s": took_s}


def replica_rows(run: ProxyRun, now: float) -> list[dict[str, Any]]:
    requests = sum(link.replica.requests for link in run.links.values())
    newest = max((_version(name) for name in run.known), default=-1)
    return [_replica(link, now, requests, newest) for link in run.links.values()]


def _replica(link: ReplicaLink, now: float, requests: int, newest: int) -> dict[str, Any]:
    replica = link.replica
    held = max((_version(name) for name in replica.loaded), default=-1)
    rtt_s = link.link.rtt_s
    return {
        "name": replica.name,
        "state": replica.state.value,
        "reason": replica.reason,
        "since_s": round(now - replica.since, 1),
        "capacity": replica.capacity,
        "in_flight": replica.in_flight,
        "requests": replica.requests,
        "failures": replica.failures,
        "tokens_per_s": round(replica.tokens_per_s, 1),
        "share": round(replica.requests / requests, 4) if requests else None,
        "kv_used": link.kv_used,
        "rtt_ms": None if rtt_s is None else round(1000 * rtt_s, 2),
        "skew_s": None if link.skew_s is None else round(link.skew_s, 3),
        "paused_s": round(replica.paused_s, 1),
        "loaded": sorted(replica.loaded),
        "digests": {
            name: parts.digest
            for name in sorted(replica.loaded)
            if (parts := parse_name(name)) is not None
        },
        "newest_version": held if held >= 0 else None,
        "lag_versions": newest - held if held >= 0 and newest >= 0 else None,
        "unverified": link.unverified,
        "quantization": link.offered.quantization if link.offered is not None else "",
        "price_per_hour": link.price_per_hour or None,
        "agent_version": link.agent_version or None,
        "vllm_version": link.offered.vllm_version if link.offered is not None else None,
        "source": link.source,
        "last_load_s": None if link.last_load_s is None else round(link.last_load_s, 3),
    }


def _version(name: str) -> int:
    parts = parse_name(name)
    return -1 if parts is None else parts.version


def routing(run: ProxyRun, now: float) -> dict[str, Any]:
    retries, holding = run.retries, run.holding
    group = run.router.group_size
    answered = sum(replica.requests - replica.failures for replica in run.fleet)
    return {
        "shares": dict(run.routed),
        "affinity_limit": round(1 - 1 / group, 4) if group > 1 and run.routed else None,
        "waiting": holding.waiting,
        "oldest_wait_s": round(now - holding.since, 1) if holding.held else 0.0,
        "held_s": round(holding.total_s(now), 1),
        "retried": retries.retried,
        "duplicates": retries.duplicates,
        "delayed": retries.delayed,
        "refused": holding.refused,
        "retries_per_success": round(retries.retried / answered, 4) if answered > 0 else None,
    }


def facts_of(run: ProxyRun) -> dict[str, Any]:
    story, engine = run.story.story, run.engine()
    versions: Mapping[str, Any] = story.versions
    trl_version = str(versions.get("trl", ""))
    return {
        "model": run.terms.base_model or (engine.base_model if engine is not None else None),
        "trl_version": trl_version or None,
        "vllm_version": engine.vllm_version if engine is not None else None,
        "agent_version": __version__,
        "sync_mode": "adapters by name, without a pause",
        "max_staleness": run.terms.max_staleness if run.terms.max_staleness >= 0 else None,
        "weight_sync_steps": story.limits.get("weight_sync_steps"),
        "queue_maxsize": story.limits.get("queue_maxsize"),
        "max_inflight_tasks": story.limits.get("max_inflight_tasks"),
        "trl_names": trl_metrics.naming_of(trl_version),
    }


def live_snapshot(run: ProxyRun, now: float) -> dict[str, Any]:
    """Without syncs and events, which come one by one."""
    row = run_row(run, now)
    return {
        "run": row,
        "verdict": row["verdict"],
        "alerts": run.alerts.alerts,
        "replicas": replica_rows(run, now),
        "routing": routing(run, now),
        "series_names": run.story.story.series.names,
        "facts": facts_of(run),
        "seq": run.story.story.events.seq,
    }


def snapshot(run: ProxyRun, now: float) -> dict[str, Any]:
    story = run.story.story
    return live_snapshot(run, now) | {
        "syncs": msgspec.to_builtins(story.syncs.find(limit=NEWEST_SYNCS)),
        "events": msgspec.to_builtins(story.events.find(limit=NEWEST_EVENTS)),
    }


def text(runs: Iterable[ProxyRun]) -> str:
    """All runs as JSON, for a dump of the proxy."""
    now = trio.current_time()
    shown = [snapshot(run, now) for run in runs]
    return msgspec.json.format(msgspec.json.encode(shown), indent=1).decode()
