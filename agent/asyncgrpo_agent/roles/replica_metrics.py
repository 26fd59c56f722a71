"""What a replica's agent tells of itself, read from its parts in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncgrpo_agent.core.adapters import parse_attempt, parse_name
from asyncgrpo_agent.core.replica_metrics import EngineFacts, ReplicaFacts, replica_samples
from asyncgrpo_agent.roles import exposition
from asyncgrpo_agent.roles.registration import host_name
from asyncgrpo_agent.roles.telemetry import Source

if TYPE_CHECKING:
    from asyncgrpo_agent.roles.replica import ReplicaAgent


def source_of(agent: ReplicaAgent) -> Source:
    return Source(
        samples=lambda: [exposition.build_sample("replica"), *replica_samples(facts_of(agent))],
        reasons=lambda: facts_of(agent).unready(),
    )


def facts_of(agent: ReplicaAgent) -> ReplicaFacts:
    loader, engine, counters = agent.loader, agent.engine, agent.watch.counters
    versions = [parts.version for name in loader.loaded if (parts := parse_name(name)) is not None]
    read = None
    if counters is not None:
        read = EngineFacts(
            running=counters.running,
            waiting=counters.waiting,
            generated_tokens=counters.generated_tokens,
            kv_used=counters.kv_used,
        )
    return ReplicaFacts(
        run=agent.join.run,
        name=host_name(agent.config),
        is_ready=engine.facts is not None,
        starts=engine.generation,
        engine=read,
        paused_s=agent.watch.paused_s,
        is_linked=agent.is_linked,
        rtt_s=agent.rtt_s,
        registrations=agent.registrations,
        is_draining=agent.stopping.is_set(),
        in_flight=agent.in_flight,
        rollouts=agent.rollouts,
        attempt=parse_attempt(loader.attempt).number if loader.attempt else None,
        staged=loader.staged,
        loaded=len(loader.loaded),
        refused=len(loader.commits.arrivals.refused),
        newest_version=max(versions, default=None),
        counts=loader.counts,
        worker_starts=loader.bucket.worker_starts,
        hung_calls=len(loader.bucket.hung_calls()),
    )
