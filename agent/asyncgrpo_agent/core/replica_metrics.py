"""The metrics of a replica, as its own agent shows them: engine, link, adapters, rollouts.

Their names differ from those of the proxy, which tells of the same replica what it sees of it.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from asyncgrpo_agent.core.metric_model import Family, Histogram, Sample, one

LOAD_BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_LABELS: Final = ("run", "replica")


def _family(name: str, words: str, *more: str) -> Family:
    return Family(name, "gauge", words, (*_LABELS, *more))


def _counter(name: str, words: str, *more: str) -> Family:
    return Family(name, "counter", words, (*_LABELS, *more))


ENGINE_READY: Final = _family("engine_ready", "1 while vLLM answers completions.")
ENGINE_STARTS: Final = _counter("engine_starts", "Starts of vLLM.")
ENGINE_RUNNING: Final = _family("engine_running_requests", "Requests that vLLM works on.")
ENGINE_WAITING: Final = _family("engine_waiting_requests", "Requests that wait in vLLM.")
ENGINE_KV: Final = _family("engine_kv_cache_used_ratio", "Share of vLLM's KV cache in use.")
ENGINE_TOKENS: Final = _counter("engine_generated_tokens", "Tokens that this vLLM has generated.")
ENGINE_PAUSED_S: Final = _counter("engine_paused_seconds", "Time that generation was paused.")
LINK_UP: Final = _family("link_up", "1 while the proxy has accepted this agent.")
LINK_RTT_S: Final = _family("link_rtt_seconds", "Round-trip time to the proxy.")
LINKS: Final = _counter("link_registrations", "Times that the proxy has accepted this agent.")
DRAINING: Final = _family("draining", "1 while no new rollouts are taken.")
IN_FLIGHT: Final = _family("served_rollouts_in_flight", "Rollouts that are being answered.")
SERVED: Final = _counter("served_rollouts", "Rollouts that have come.")
ATTEMPT: Final = _family("adapters_attempt", "Number of the attempt whose adapters are loaded.")
STAGED: Final = _family("adapters_staged", "Adapters on this host's disk.")
LOADED: Final = _family("adapters_loaded", "Adapters that vLLM holds.")
REFUSED: Final = _family("adapters_refused", "Adapters in the bucket that are not taken.")
NEWEST: Final = _family("adapters_newest_version", "Newest version that vLLM holds.")
STAGED_BYTES: Final = _counter("adapters_staged_bytes", "Bytes of adapters taken and verified.")
LOAD_S: Final = Family(
    "adapter_load_seconds", "histogram", "From the notice of an adapter until vLLM held it.",
    _LABELS,
)  # fmt: skip
FAILURES: Final = _counter(
    "adapter_failures", "Adapters, or rounds, that failed, by the kind of error.", "error"
)
WORKERS: Final = _counter("bucket_worker_starts", "Starts of the process that reads the bucket.")
HUNG: Final = _family("bucket_hung_calls", "Calls that the bucket's mount does not answer.")


@dataclass(slots=True)
class LoadCounts:
    """What came of the adapters that a replica was to load, since its agent started."""

    staged_bytes: int = 0
    load_s: Histogram = field(default_factory=lambda: Histogram(LOAD_BOUNDS_S))
    failures: Counter[str] = field(default_factory=Counter)  # by the name of the error's class

    def failed(self, error: Exception | str) -> None:
        self.failures[error if isinstance(error, str) else type(error).__name__] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """vLLM's own counters, as they were last read."""

    running: int
    waiting: int
    generated_tokens: int
    kv_used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """One replica as it is now. None for what is not known."""

    run: str
    name: str
    is_ready: bool
    starts: int
    engine: EngineFacts | None
    paused_s: float
    is_linked: bool
    rtt_s: float | None
    registrations: int
    is_draining: bool
    in_flight: int
    rollouts: int
    attempt: int | None
    staged: int
    loaded: int
    refused: int
    newest_version: int | None
    counts: LoadCounts
    worker_starts: int
    hung_calls: int

    def unready(self) -> list[str]:
        """Why it takes no rollouts, without a name of anything."""
        reasons = {
            "the engine is not ready": not self.is_ready,
            "there is no link to the proxy": not self.is_linked,
            "it is draining": self.is_draining,
        }
        return [reason for reason, holds in reasons.items() if holds]


def replica_samples(facts: ReplicaFacts) -> Iterator[Sample]:
    """All of one replica."""
    labels = (facts.run, facts.name)
    plain: list[tuple[Family, float | None]] = [
        (ENGINE_READY, facts.is_ready),
        (ENGINE_STARTS, facts.starts),
        (ENGINE_PAUSED_S, facts.paused_s),
        (LINK_UP, facts.is_linked),
        (LINK_RTT_S, facts.rtt_s),
        (LINKS, facts.registrations),
        (DRAINING, facts.is_draining),
        (IN_FLIGHT, facts.in_flight),
        (SERVED, facts.rollouts),
        (ATTEMPT, facts.attempt),
        (STAGED, facts.staged),
        (LOADED, facts.loaded),
        (REFUSED, facts.refused),
        (NEWEST, facts.newest_version),
        (STAGED_BYTES, facts.counts.staged_bytes),
        (WORKERS, facts.worker_starts),
        (HUNG, facts.hung_calls),
    ]
    if (engine := facts.engine) is not None:
        plain += [
            (ENGINE_RUNNING, engine.running),
            (ENGINE_WAITING, engine.waiting),
            (ENGINE_KV, engine.kv_used),
            (ENGINE_TOKENS, engine.generated_tokens),
        ]
    for family, value in plain:
        yield from one(family, labels, value)
    yield Sample(LOAD_S, labels, facts.counts.load_s)
    for error, count in sorted(facts.counts.failures.items()):
        yield from one(FAILURES, (*labels, error), count)
