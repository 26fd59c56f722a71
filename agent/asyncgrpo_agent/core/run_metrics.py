"""The metrics of one run at its proxy: what is shown of it, as samples with stable names.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from asyncgrpo_agent.core import trl_metrics, verdict
from asyncgrpo_agent.core.metric_model import Family, Sample, one, one_of
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.core.sync_counts import OUTCOMES, SyncCounts
from asyncgrpo_agent.core.usage import HOUR_S

RUN_STATES: Final = ("waiting", "running", "finished", "failed", "past")
VERDICTS: Final[tuple[str, ...]] = get_args(verdict.Kind)
REPLICA_STATES: Final = tuple(state.value for state in State if state is not State.GONE)
ROUTES: Final = ("affinity", "least loaded", "spill", "probe")

_RUN: Final = ("run",)
_REPLICA: Final = ("run", "replica")

RUN_INFO: Final = Family(
    "run", "info", "What the run trains and with what.", ("run", "model", "trl", "vllm")
)
RUN_STATE: Final = Family("run_state", "gauge", "1 for the state of the run.", ("run", "state"))
RUN_VERDICT: Final = Family(
    "run_verdict", "gauge", "1 for what holds the run up.", ("run", "verdict")
)
RUN_REPLICAS: Final = Family(
    "run_replicas", "gauge", "Registered replicas by state.", ("run", "state")
)
ATTEMPT: Final = Family("run_attempt", "gauge", "Number of the trainer's attempt.", _RUN)
STEP: Final = Family("run_step", "gauge", "Newest step of the training.", _RUN)
MAX_STEPS: Final = Family("run_max_steps", "gauge", "Steps that the training is to take.", _RUN)
COST: Final = Family(
    "run_cost", "counter", "Cost of replicas whose price is known, in the prices' currency.", _RUN
)
REPLICA_S: Final = Family(
    "run_replica_seconds", "counter", "Time that replicas were registered, summed.", _RUN
)
UNPRICED_S: Final = Family(
    "run_unpriced_replica_seconds", "counter", "The part of it whose price is not known.", _RUN
)
ALERTS: Final = Family("run_alerts", "gauge", "Alerts that hold.", ("run", "kind", "severity"))

CLASS_RATIO: Final = Family(
    "train_class_importance_ratio",
    "gauge",
    "Mean importance ratio of the newest step, by the class of the replicas that sampled.",
    ("run", "class"),
)
QUEUE_LIMIT: Final = Family(
    "train_queue_limit_rollouts", "gauge", "Rollouts that TRL's queue may hold.", _RUN
)
TRL: Final[Mapping[str, Family]] = {
    trl_metrics.REWARD: Family("train_reward", "gauge", "Mean reward of the newest step.", _RUN),
    trl_metrics.RATIO: Family(
        "train_importance_ratio", "gauge", "Mean importance ratio of the newest step.", _RUN
    ),
    trl_metrics.KL: Family("train_kl", "gauge", "KL of the newest step.", _RUN),
    trl_metrics.ENTROPY: Family("train_entropy", "gauge", "Entropy of the newest step.", _RUN),
    trl_metrics.STALENESS: Family(
        "train_staleness_versions", "gauge", "Mean versions that samples are behind.", _RUN
    ),
    trl_metrics.DROPPED_STALE: Family(
        "train_dropped_stale_samples", "gauge", "Samples dropped as too old in this attempt.", _RUN
    ),
    trl_metrics.SAMPLES: Family("train_step_samples", "gauge", "Samples of the newest step.", _RUN),
    trl_metrics.QUEUE: Family(
        "train_queue_rollouts", "gauge", "Rollouts that wait in TRL's queue.", _RUN
    ),
    trl_metrics.IN_FLIGHT: Family(
        "train_in_flight_rollouts", "gauge", "Rollouts that TRL waits for.", _RUN
    ),
    trl_metrics.STEP_S: Family("train_step_seconds", "gauge", "Time of the newest step.", _RUN),
    trl_metrics.FWD_BWD_S: Family(
        "train_forward_backward_seconds", "gauge", "Its forward and backward passes.", _RUN
    ),
    trl_metrics.WAIT_S: Family(
        "train_rollout_wait_seconds", "gauge", "Its wait for rollouts.", _RUN
    ),
    trl_metrics.SYNC_S: Family(
        "train_weight_sync_seconds", "gauge", "Its wait for a weight sync.", _RUN
    ),
    trl_metrics.BACKPRESSURE_S: Family(
        "train_backpressure_seconds", "gauge", "Time that its rollouts waited for the queue.", _RUN
    ),
    trl_metrics.TOKENS_PER_S: Family(
        "train_tokens_per_second", "gauge", "Generated tokens a second, as TRL counts.", _RUN
    ),
}

ROLLOUTS: Final = Family("rollouts", "counter", "Rollouts that came from the trainer.", _RUN)
ROUTED: Final = Family(
    "rollouts_routed", "counter", "Rollouts sent to a replica, by why it was chosen.",
    ("run", "reason"),
)  # fmt: skip
RETRIED: Final = Family("rollouts_retried", "counter", "Rollouts sent again.", _RUN)
DUPLICATED: Final = Family(
    "rollouts_duplicated", "counter", "Of those sent again, those that may have run before.", _RUN
)
DELAYED: Final = Family(
    "rollouts_delayed", "counter", "Of those sent again, those that waited for the budget.", _RUN
)
REFUSED: Final = Family(
    "rollouts_refused", "counter", "Rollouts sent back because the proxy's queue was full.", _RUN
)
HELD: Final = Family("rollouts_held", "gauge", "Rollouts that wait for a replica now.", _RUN)
OLDEST_WAIT_S: Final = Family(
    "rollouts_oldest_wait_seconds", "gauge", "How long the oldest of them has waited.", _RUN
)
HELD_S: Final = Family(
    "rollouts_held_seconds", "counter", "Time in which some rollout waited for a replica.", _RUN
)

SYNCS: Final = Family("syncs", "counter", "Syncs that ended, by outcome.", ("run", "outcome"))
QUORUM_S: Final = Family(
    "sync_quorum_seconds", "histogram", "From an announcement until enough replicas held it.", _RUN
)
LAST_SYNC_S: Final = Family("sync_last_seconds", "gauge", "The same of the last sync.", _RUN)
SYNC_BYTES: Final = Family("sync_last_bytes", "gauge", "Size of the newest adapter.", _RUN)
REFUSALS: Final = Family(
    "adapter_refusals", "counter", "Adapters that a replica could not load or refused.", _RUN
)

REPLICA_INFO: Final = Family(
    "replica", "info", "What the replica runs.",
    (*_REPLICA, "agent", "vllm", "quantization", "source"),
)  # fmt: skip
REPLICA_STATE: Final = Family(
    "replica_state", "gauge", "1 for the state of the replica.", (*_REPLICA, "state")
)
REPLICA: Final[Mapping[str, Family]] = {
    "in_flight": Family("replica_in_flight_rollouts", "gauge", "Rollouts that it has.", _REPLICA),
    "capacity": Family(
        "replica_capacity_rollouts", "gauge", "Rollouts that it takes at once.", _REPLICA
    ),
    "requests": Family("replica_requests", "counter", "Rollouts sent to it.", _REPLICA),
    "failures": Family("replica_failures", "counter", "Rollouts that failed there.", _REPLICA),
    "tokens_per_s": Family(
        "replica_tokens_per_second", "gauge", "Tokens that it generates a second.", _REPLICA
    ),
    "kv_used": Family(
        "replica_kv_cache_used_ratio", "gauge", "Share of its KV cache in use.", _REPLICA
    ),
    "skew_s": Family(
        "replica_clock_skew_seconds", "gauge", "Its clock ahead of the proxy's.", _REPLICA
    ),
    "paused_s": Family(
        "replica_paused_seconds", "counter", "Time that its generation was paused.", _REPLICA
    ),
    "newest_version": Family(
        "replica_adapter_version", "gauge", "Newest version that it holds.", _REPLICA
    ),
    "lag_versions": Family(
        "replica_adapter_lag_versions", "gauge", "Versions behind the newest one.", _REPLICA
    ),
    "last_load_s": Family(
        "replica_last_load_seconds", "gauge", "Time to load its newest adapter.", _REPLICA
    ),
}
RTT_S: Final = Family("replica_rtt_seconds", "gauge", "Round-trip time to it.", _REPLICA)
LOADED: Final = Family("replica_adapters_loaded", "gauge", "Adapters that it holds.", _REPLICA)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """`snapshot` is the live one that viewers are shown, as plain values."""

    snapshot: Mapping[str, Any]
    newest: Mapping[str, float] = field(default_factory=dict)  # TRL's metrics
    attempt: int | None = None
    rollouts: int = 0
    unpriced_s: float = 0.0
    syncs: SyncCounts = field(default_factory=SyncCounts)
    sync_bytes: int | None = None


def run_samples(facts: RunFacts) -> Iterator[Sample]:
    """All of one run."""
    shown = facts.snapshot
    row, known = shown["run"], shown["facts"]
    run = (str(row["name"]),)
    versions = [str(known.get(name) or "") for name in ("model", "trl_version", "vllm_version")]
    yield from one(RUN_INFO, (*run, *versions), 1)
    yield from one_of(RUN_STATE, run, RUN_STATES, row["state"])
    yield from one_of(RUN_VERDICT, run, VERDICTS, (shown["verdict"] or {}).get("kind", ""))
    states = Counter(replica["state"] for replica in shown["replicas"])
    for state in REPLICA_STATES:
        yield from one(RUN_REPLICAS, (*run, state), states[state])
    yield from one(ATTEMPT, run, facts.attempt)
    yield from one(STEP, run, row["step"])
    yield from one(MAX_STEPS, run, row["max_steps"])
    yield from one(COST, run, row["cost"])
    yield from one(REPLICA_S, run, row["replica_hours"] * HOUR_S)
    yield from one(UNPRICED_S, run, facts.unpriced_s)
    alerts = Counter((str(one["kind"]), str(one["severity"])) for one in shown["alerts"])
    for labels, count in sorted(alerts.items()):
        yield from one(ALERTS, (*run, *labels), count)
    yield from one(QUEUE_LIMIT, run, _number(known.get("queue_maxsize")))
    for name, family in TRL.items():
        yield from one(family, run, trl_metrics.value_of(facts.newest, name))
    for name, ratio in trl_metrics.ratios_by_class(facts.newest).items():
        yield from one(CLASS_RATIO, (*run, name), ratio)
    yield from _routing(run, facts)
    yield from _syncs(run, facts)
    for replica in shown["replicas"]:
        yield from _replica((*run, str(replica["name"])), replica)


def _routing(run: tuple[str, ...], facts: RunFacts) -> Iterator[Sample]:
    routing = facts.snapshot["routing"]
    yield from one(ROLLOUTS, run, facts.rollouts)
    for reason in dict.fromkeys((*ROUTES, *routing["shares"])):
        count = routing["shares"].get(reason, 0)
        yield from one(ROUTED, (*run, reason.replace(" ", "_")), count)
    yield from one(RETRIED, run, routing["retried"])
    yield from one(DUPLICATED, run, routing["duplicates"])
    yield from one(DELAYED, run, routing["delayed"])
    yield from one(REFUSED, run, routing["refused"])
    yield from one(HELD, run, routing["waiting"])
    yield from one(OLDEST_WAIT_S, run, routing["oldest_wait_s"])
    yield from one(HELD_S, run, routing["held_s"])


def _syncs(run: tuple[str, ...], facts: RunFacts) -> Iterator[Sample]:
    for outcome in OUTCOMES:
        yield from one(SYNCS, (*run, outcome), facts.syncs.outcomes[outcome])
    yield Sample(QUORUM_S, run, facts.syncs.quorum_s)
    yield from one(LAST_SYNC_S, run, facts.syncs.last_s)
    yield from one(SYNC_BYTES, run, facts.sync_bytes)
    yield from one(REFUSALS, run, facts.syncs.refusals)


def _replica(labels: tuple[str, ...], row: Mapping[str, Any]) -> Iterator[Sample]:
    names = ("agent_version", "vllm_version", "quantization", "source")
    yield from one(REPLICA_INFO, (*labels, *(str(row[name] or "") for name in names)), 1)
    yield from one_of(REPLICA_STATE, labels, REPLICA_STATES, row["state"])
    for name, family in REPLICA.items():
        yield from one(family, labels, row[name])
    rtt_ms = row["rtt_ms"]
    yield from one(RTT_S, labels, None if rtt_ms is None else rtt_ms / 1000)
    yield from one(LOADED, labels, len(row["loaded"]))


def _number(value: object) -> float | None:
    """One of TRL's settings, which may be anything."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
