"""The metrics of a trainer, as its own agent shows them: training, syncs, checkpoints, gateway.

`TrainerCounts` folds what the agent records for its history; it outlives the starts of TRL. Names
differ from those of the proxy, which tells of the same run what it hears of it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from asyncgrpo_agent.core import run_metrics, trl_metrics
from asyncgrpo_agent.core.metric_model import Family, Histogram, Sample, one, one_of
from asyncgrpo_agent.core.sync_counts import BOUNDS_S, OUTCOMES

PHASES: Final = ("checking", "waiting", "loading", "training", "evaluating", "saving", "done")
OTHER: Final = "other"  # a phase of a later version, or of a user's own program
_RUN: Final = ("run",)


def _family(name: str, words: str, *more: str) -> Family:
    return Family(f"trainer_{name}", "gauge", words, (*_RUN, *more))


def _counter(name: str, words: str, *more: str) -> Family:
    return Family(f"trainer_{name}", "counter", words, (*_RUN, *more))


STEP: Final = _family("step", "Newest step of the training.")
MAX_STEPS: Final = _family("max_steps", "Steps that the training is to take.")
PHASE: Final = _family("phase", "1 for what TRL says that it does.", "phase")
TRAINING: Final = _family("training", "1 while TRL runs.")
ATTEMPT: Final = _family("attempt", "Number of this attempt.")
RESTARTS: Final = _counter("restarts", "Times that TRL was started again.")
LINK_UP: Final = _family("link_up", "1 while the proxy has accepted this agent.")
LINK_RTT_S: Final = _family("link_rtt_seconds", "Round-trip time to the proxy.")
LINKS: Final = _counter("link_registrations", "Times that the proxy has accepted this attempt.")
READY_REPLICAS: Final = _family("ready_replicas", "Replicas whose engine is up.")
IN_FLIGHT: Final = _family("gateway_in_flight_rollouts", "Rollouts that TRL waits for.")
ROLLOUTS: Final = _counter("rollouts", "Rollouts that were answered, by outcome.", "outcome")
RESENT: Final = _counter("rollouts_resent", "Rollouts sent again over another link.")
PUT_OFF: Final = _counter("rollouts_put_off", "Times that the proxy had no room for a rollout.")
LIVE: Final = _family("live_adapters", "Adapters that a rollout may name.")
SYNCS: Final = _counter("syncs", "Syncs that ended, by outcome.", "outcome")
SYNC_S: Final = Family(
    "trainer_sync_seconds", "histogram", "TRL's load call: from its adapter to the quorum.", _RUN
)
LAST_SYNC_S: Final = _family("sync_last_seconds", "The same of the last sync.")
SYNC_BYTES: Final = _counter("sync_bytes", "Bytes of adapters published.")
FAILING: Final = _family("bucket_failing", "1 while an adapter cannot be written there.")
SAVED_STEP: Final = _family("checkpoint_saved_step", "Step of the newest one on this host.")
SAVED_AT: Final = _family("checkpoint_saved_timestamp_seconds", "When that was first seen.")
MIRRORED: Final = _counter("checkpoints_mirrored", "Checkpoints copied into the bucket.")
MIRRORED_STEP: Final = _family("checkpoint_mirrored_step", "Step of the newest of them.")
MIRRORED_AT: Final = _family("checkpoint_mirrored_timestamp_seconds", "When one was last copied.")
MIRROR_S: Final = _family("checkpoint_mirror_last_seconds", "Time that the last copy took.")
WORKERS: Final = _counter("bucket_worker_starts", "Starts of the process that holds the bucket.")
HUNG: Final = _family("bucket_hung_calls", "Calls that the bucket's mount does not answer.")
TRL: Final[Mapping[str, Family]] = {
    name: replace(family, name=family.name.replace("train_", "trainer_", 1))
    for name, family in run_metrics.TRL.items()
}

CLASS_RATIO: Final = replace(run_metrics.CLASS_RATIO, name="trainer_class_importance_ratio")


@dataclass(slots=True)
class TrainerCounts:
    """What was recorded since the agent started."""

    max_steps: int | None = None
    phase: str = ""
    restarts: int = 0
    answered: int = 0
    failed: int = 0
    resent: int = 0  # of earlier starts of TRL
    put_off: int = 0  # the same
    syncs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    sync_s: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    last_sync_s: float | None = None
    sync_bytes: int = 0
    mirrored: int = 0
    mirrored_step: int | None = None
    mirrored_at_unix_s: float | None = None
    mirror_s: float | None = None
    newest: dict[str, float] = field(default_factory=dict)  # TRL's metrics

    def answer(self, *, ok: bool) -> None:
        """A rollout has its answer."""
        self.answered += ok
        self.failed += not ok

    def add(self, kind: str, fields: Mapping[str, Any], now_unix_s: float) -> None:
        """Fold one record in. Some are TRL's own words: one that makes no sense is skipped."""
        try:
            self._add(kind, fields, now_unix_s)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def _add(self, kind: str, fields: Mapping[str, Any], now_unix_s: float) -> None:
        match kind:
            case "metrics":
                self.max_steps = int(fields.get("max_steps") or 0) or self.max_steps
                for name, value in fields["values"].items():
                    self.newest[str(name)] = float(value)
            case "phase":
                phase = str(fields["phase"])
                self.phase = phase if phase in PHASES else OTHER
            case "started":
                self.max_steps = int(fields.get("max_steps") or 0) or self.max_steps
            case "sync":
                report = fields["report"]
                timed_out = report is None or bool(report["timed_out"])
                self.syncs["timed_out" if timed_out else "reached"] += 1
                self.last_sync_s = float(fields["seconds"])
                self.sync_s.observe(self.last_sync_s)
                self.sync_bytes += int(fields["bytes"])
            case "checkpoint":
                self.mirrored += 1
                self.mirrored_step = int(fields["step"])
                self.mirrored_at_unix_s = now_unix_s
                self.mirror_s = float(fields["seconds"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """One start of TRL as it is now. None for what is not known."""

    step: int | None = None
    attempt: int | None = None
    is_training: bool = False
    is_stopping: bool = False
    is_linked: bool = False
    rtt_s: float | None = None
    registrations: int = 0
    ready_replicas: int = 0
    in_flight: int = 0
    resent: int = 0
    put_off: int = 0
    live_adapters: int = 0
    is_bucket_failing: bool = False
    saved_step: int | None = None
    saved_at_unix_s: float | None = None
    worker_starts: int = 0
    hung_calls: int = 0

    def unready(self) -> list[str]:
        """Why the training does not go on, without a name of anything."""
        reasons = {
            "there is no link to the proxy": not self.is_linked,
            "no replica is ready": not self.ready_replicas,
            "TRL does not run": not self.is_training,
            "an adapter cannot be written to the bucket": self.is_bucket_failing,
            "it is stopping": self.is_stopping,
        }
        return [reason for reason, holds in reasons.items() if holds]


def trainer_samples(run: str, counts: TrainerCounts, now: TrainerFacts) -> Iterator[Sample]:
    """All of one trainer."""
    labels = (run,)
    for family, value in _plain(counts, now):
        yield from one(family, labels, value)
    yield from one_of(PHASE, labels, (*PHASES, OTHER), counts.phase)
    yield from one(ROLLOUTS, (*labels, "answered"), counts.answered)
    yield from one(ROLLOUTS, (*labels, "failed"), counts.failed)
    for outcome, count in counts.syncs.items():
        yield from one(SYNCS, (*labels, outcome), count)
    yield Sample(SYNC_S, labels, counts.sync_s)
    for name, family in TRL.items():
        yield from one(family, labels, trl_metrics.value_of(counts.newest, name))
    for name, ratio in trl_metrics.ratios_by_class(counts.newest).items():
        yield from one(CLASS_RATIO, (*labels, name), ratio)


def _plain(counts: TrainerCounts, now: TrainerFacts) -> list[tuple[Family, float | None]]:
    return [
        (STEP, now.step),
        (MAX_STEPS, counts.max_steps),
        (TRAINING, now.is_training),
        (ATTEMPT, now.attempt),
        (RESTARTS, counts.restarts),
        (LINK_UP, now.is_linked),
        (LINK_RTT_S, now.rtt_s),
        (LINKS, now.registrations),
        (READY_REPLICAS, now.ready_replicas),
        (IN_FLIGHT, now.in_flight),
        (RESENT, counts.resent + now.resent),
        (PUT_OFF, counts.put_off + now.put_off),
        (LIVE, now.live_adapters),
        (LAST_SYNC_S, counts.last_sync_s),
        (SYNC_BYTES, counts.sync_bytes),
        (FAILING, now.is_bucket_failing),
        (SAVED_STEP, now.saved_step),
        (SAVED_AT, now.saved_at_unix_s),
        (MIRRORED, counts.mirrored),
        (MIRRORED_STEP, counts.mirrored_step),
        (MIRRORED_AT, counts.mirrored_at_unix_s),
        (MIRROR_S, counts.mirror_s),
        (WORKERS, now.worker_starts),
        (HUNG, now.hung_calls),
    ]
