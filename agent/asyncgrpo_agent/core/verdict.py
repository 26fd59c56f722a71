"""What holds a run up: the trainer, the generation, the syncs, or lost replicas; with the proof.

Read from pairs, for one number alone says little: the queue is full and the trainer never waits;
the queue is empty and it waits; as many rollouts as allowed are in flight and it waits; the syncs
take a large share of the steps; replicas are lost. Means are over the newest steps.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from asyncgrpo_agent.core import trl_metrics as t

STEPS: Final = 20
FEWEST_STEPS: Final = 3
WAIT_SHARE: Final = 0.15  # of a step, from which on the trainer waits
SYNC_SHARE: Final = 0.25
FULL: Final = 0.8  # of what the queue holds
EMPTY: Final = 0.1
PINNED: Final = 0.95  # of the rollouts that may be in flight
LOST_SHARE: Final = 0.34  # of the registered replicas
DEFAULT_QUEUE: Final = 1024.0  # of AsyncGRPOConfig

Kind = Literal[
    "trainer-bound",
    "generation-bound",
    "sync-bound",
    "degraded",
    "balanced",
    "starting",
    "finished",
]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number; `limit` is what it is compared with."""

    name: str
    value: float
    unit: str
    limit: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    sentence: str
    evidence: list[Evidence] = []
    advice: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The replicas as they are now. `gone` counts those lost in the last minutes."""

    registered: int = 0
    ready: int = 0
    suspect: int = 0
    gone: int = 0
    waiting: int = 0  # rollouts that no replica can take


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    step_s: float
    wait: float  # share of the steps
    sync: float  # share of the steps
    queue: float | None
    queue_limit: float
    in_flight: float | None
    in_flight_limit: float | None
    backpressure_s: float
    over: str


def judge(
    steps: Sequence[Mapping[str, float]],
    limits: Mapping[str, object],
    fleet: FleetFacts,
    *,
    finished: str = "",
    over: str = "",
    most: int = STEPS,
) -> Verdict:
    """`steps` are TRL's metrics, oldest first; `limits` those of its configuration.

    The newest `most` of them count; `over` says what they are, if it is not the last steps.
    """
    if finished:
        return Verdict(kind="finished", sentence=f"Finished: {finished}.")
    if (degraded := _degraded(fleet)) is not None:
        return degraded
    means = _means(steps[-most:], limits, over)
    if means is None:
        told = f"{fleet.ready} of {fleet.registered} replicas are ready"
        return Verdict(kind="starting", sentence=f"Starting: {told}, no steps to judge by yet.")
    if means.sync >= SYNC_SHARE and means.sync >= means.wait:
        return _sync_bound(means)
    if means.wait >= WAIT_SHARE:
        return _generation_bound(means)
    if means.backpressure_s > 0 or _is_full(means):
        return _trainer_bound(means)
    sentence = (
        f"Balanced: over {means.over} the trainer waited {means.wait:.0%} of the"
        f" time and syncs took {means.sync:.0%}."
    )
    return Verdict(kind="balanced", sentence=sentence, evidence=_evidence(means))


def _degraded(fleet: FleetFacts) -> Verdict | None:
    lost = fleet.suspect + fleet.gone
    known = fleet.registered + fleet.gone
    if not known or (fleet.ready and lost < LOST_SHARE * known):
        return None
    if not lost:
        return None
    sentence = (
        f"Degraded: {lost} of {known} replicas are lost or suspect"
        f" ({fleet.suspect} suspect, {fleet.gone} gone), {fleet.ready} are ready."
    )
    evidence = [
        Evidence(name="replicas lost or suspect", value=lost, unit="", limit=LOST_SHARE * known),
        Evidence(name="rollouts waiting", value=fleet.waiting, unit=""),
    ]
    advice = ["See the events for why they went.", "Start others in their place."]
    return Verdict(kind="degraded", sentence=sentence, evidence=evidence, advice=advice)


def _means(
    steps: Sequence[Mapping[str, float]], limits: Mapping[str, object], over: str
) -> _Means | None:
    timed = [values for values in steps if t.value_of(values, t.STEP_S)]
    if len(timed) < FEWEST_STEPS:
        return None
    total_s = sum(t.value_of(values, t.STEP_S) or 0.0 for values in timed)

    def share(name: str) -> float:
        return min(1.0, sum(t.value_of(values, name) or 0.0 for values in timed) / total_s)

    return _Means(
        step_s=total_s / len(timed),
        wait=share(t.WAIT_S),
        sync=share(t.SYNC_S),
        queue=_mean(timed, t.QUEUE),
        queue_limit=_limit(limits, "queue_maxsize") or DEFAULT_QUEUE,
        in_flight=_mean(timed, t.IN_FLIGHT),
        in_flight_limit=_limit(limits, "max_inflight_tasks"),
        backpressure_s=_mean(timed, t.BACKPRESSURE_S) or 0.0,
        over=over or f"the last {len(timed)} steps",
    )


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [value for step in steps if (value := t.value_of(step, name)) is not None]
    return sum(values) / len(values) if values else None


def _limit(limits: Mapping[str, object], name: str) -> float | None:
    value = limits.get(name)
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _is_full(means: _Means) -> bool:
    return means.queue is not None and means.queue >= FULL * means.queue_limit


def _is_pinned(means: _Means) -> bool:
    limit = means.in_flight_limit
    return means.in_flight is not None and limit is not None and means.in_flight >= PINNED * limit


def _queue(means: _Means) -> str:
    if means.queue is None:
        return "the length of the queue is not known"
    state = (
        "full" if _is_full(means) else "empty" if means.queue <= EMPTY * means.queue_limit else ""
    )
    told = f"{means.queue:.3g} of {means.queue_limit:g}"
    return f"the queue was {state} ({told})" if state else f"the queue held {told}"


def _sync_bound(means: _Means) -> Verdict:
    sentence = (
        f"Sync-bound: syncs took {means.sync:.0%} of {means.over}"
        f" ({means.sync * means.step_s:.1f} s of {means.step_s:.1f} s each)."
    )
    advice = [
        "See the syncs for the replica and the phase that take longest.",
        "Raise weight_sync_steps, lower the quorum, or use a faster bucket.",
    ]
    return Verdict(kind="sync-bound", sentence=sentence, evidence=_evidence(means), advice=advice)


def _generation_bound(means: _Means) -> Verdict:
    sentence = (
        f"Generation-bound: the trainer waited {means.wait:.0%} of {means.over} and"
        f" {_queue(means)}."
    )
    advice = ["Add replicas or shorten max_completion_length."]
    if _is_pinned(means):
        sentence += (
            f" All {means.in_flight_limit:g} rollouts that may be in flight were, so that more"
            " replicas alone do not help."
        )
        advice = ["Raise max_inflight_tasks; then add replicas if they are full."]
    return Verdict(
        kind="generation-bound", sentence=sentence, evidence=_evidence(means), advice=advice
    )


def _trainer_bound(means: _Means) -> Verdict:
    sentence = (
        f"Trainer-bound: the trainer waited {means.wait:.0%} of {means.over} and {_queue(means)}."
    )
    if means.backpressure_s:
        sentence += f" Finished rollouts were held back for {means.backpressure_s:.1f} s a step."
    advice = [
        "Make the trainer faster (more GPUs, a larger token budget), or run fewer replicas: some of"
        " what they generate becomes too old to be used.",
    ]
    return Verdict(
        kind="trainer-bound", sentence=sentence, evidence=_evidence(means), advice=advice
    )


def _evidence(means: _Means) -> list[Evidence]:
    found = [
        Evidence(name="waiting for rollouts", value=means.wait, unit="share", limit=WAIT_SHARE),
        Evidence(name="syncs", value=means.sync, unit="share", limit=SYNC_SHARE),
        Evidence(name="backpressure", value=means.backpressure_s, unit="s"),
        Evidence(name="step", value=means.step_s, unit="s"),
    ]
    if means.queue is not None:
        found.append(
            Evidence(name="queue", value=means.queue, unit="samples", limit=means.queue_limit)
        )
    if means.in_flight is not None:
        limit = means.in_flight_limit
        found.append(
            Evidence(name="in flight", value=means.in_flight, unit="rollouts", limit=limit)
        )
    return found
