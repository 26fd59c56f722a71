"""What somebody should look at in a run, each with the number, its limit and what to do.

`look` finds what is wrong now; a `Board` keeps it until it was right again for a while, so that a
number which goes to and fro over its limit is one alert. Unlike the verdict, which names what holds
a healthy run up, an alert says that a run is not what its user takes it for, or soon will not be.

Pure: readings of clocks come with each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from asyncgrpo_agent.core import trl_metrics as t
from asyncgrpo_agent.core.sync_rows import SyncRow

STEPS: Final = 20
FEWEST_SYNCS: Final = 5
LOADS: Final = 5  # of one replica whose median tells of its mount
FEWEST_TRIES: Final = 20  # rollouts within the window of `Tries`
WINDOW_S: Final = 600.0
CLEAR_AFTER_S: Final = 30.0

Kind = Literal[
    "ratio",
    "wrong-digest",
    "no-effect",
    "slow-sync",
    "stale-drops",
    "slots-short",
    "retries",
    "clock-skew",
    "slow-mount",
]
Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an alert begins. The defaults are those of the configuration."""

    ratio_low: float = 0.97
    ratio_high: float = 1.03
    sync_p95_s: float = 60.0
    stale_share: float = 0.2
    tries_per_success: float = 1.2
    clock_skew_s: float = 5.0
    mount_slow_s: float = 20.0
    no_effect_versions: int = 8


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong now. `subject` is a replica's name, "" where it is the whole run."""

    kind: Kind
    severity: Severity
    sentence: str
    fix: str
    subject: str = ""
    value: float | None = None
    limit: float | None = None


class Alert(Finding, frozen=True, kw_only=True):
    """A finding that stands, and since when."""

    since_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """One replica. `effect` is the greatest difference that the adapter of `effect_version` made to
    a log-probability of the base model."""

    name: str
    skew_s: float | None = None
    loaded: Mapping[int, str] = field(default_factory=dict)  # version -> digest, of this attempt
    effect: float | None = None
    effect_version: int = -1
    slots_fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run as it is now."""

    steps: Sequence[Mapping[str, float]] = ()  # TRL's metrics, oldest first
    syncs: Sequence[SyncRow] = ()  # newest first
    replicas: Sequence[ReplicaFacts] = ()
    announced: Mapping[int, str] = field(default_factory=dict)  # version -> digest
    tries_per_success: float | None = None  # over the last WINDOW_S


def look(facts: RunFacts, limits: Limits) -> list[Finding]:
    """All that is wrong, the worst first."""
    found: list[Finding] = [
        *_wrong_digests(facts),
        *_without_effect(facts, limits),
        *_ratio(facts, limits),
        *_class_ratios(facts, limits),
        *_stale_drops(facts, limits),
        *_slow_syncs(facts, limits),
        *_slow_mounts(facts, limits),
        *_retries(facts, limits),
        *_skewed(facts, limits),
        *_short_of_slots(facts),
    ]
    return sorted(found, key=lambda one: one.severity != "error")


def _wrong_digests(facts: RunFacts) -> list[Finding]:
    found = []
    for replica in facts.replicas:
        wrong = [
            version
            for version, digest in sorted(replica.loaded.items())
            if facts.announced.get(version, digest) != digest
        ]
        if wrong:
            version = wrong[-1]
            sentence = (
                f"{replica.name} serves version {version} as {replica.loaded[version]}, and the"
                f" trainer announced {facts.announced[version]}."
            )
            fix = "Drain that replica; two trainers may be writing under one attempt."
            found.append(
                Finding(
                    kind="wrong-digest", severity="error", sentence=sentence, fix=fix,
                    subject=replica.name, value=float(version),
                )
            )  # fmt: skip
    return found


def _without_effect(facts: RunFacts, limits: Limits) -> list[Finding]:
    found = []
    for replica in facts.replicas:
        if replica.effect == 0.0 and replica.effect_version >= limits.no_effect_versions:
            sentence = (
                f"Version {replica.effect_version} changes nothing on {replica.name}: its"
                " log-probabilities are those of the base model."
            )
            fix = (
                "See whether the learning rate is 0, and whether the adapter's target modules are"
                " ones that vLLM serves; asyncgrpo-agent adapters get fetches it."
            )
            found.append(
                Finding(
                    kind="no-effect", severity="error", sentence=sentence, fix=fix,
                    subject=replica.name, value=0.0,
                )
            )  # fmt: skip
    return found


def _ratio(facts: RunFacts, limits: Limits) -> list[Finding]:
    mean = _mean_of_steps(facts, t.RATIO)
    if mean is None or limits.ratio_low <= mean <= limits.ratio_high:
        return []
    sentence = (
        f"The importance ratio averaged {mean:.4f} over the last {STEPS} steps (band"
        f" {limits.ratio_low:g} to {limits.ratio_high:g}): the policy that samples is not the one"
        " that is trained."
    )
    fix = "Compare number formats, quantisation and vLLM versions of the replicas with the trainer."
    limit = limits.ratio_low if mean < limits.ratio_low else limits.ratio_high
    return [
        Finding(kind="ratio", severity="error", sentence=sentence, fix=fix, value=mean, limit=limit)
    ]


def _class_ratios(facts: RunFacts, limits: Limits) -> list[Finding]:
    """The mean over all may hide a class that is off. It was allowed, so that it is a warning."""
    found = []
    names = {name for step in facts.steps[-STEPS:] for name in t.ratios_by_class(step)}
    for name in sorted(names):
        mean = _mean_of_steps(facts, t.RATIO_OF + name)
        if mean is None or limits.ratio_low <= mean <= limits.ratio_high:
            continue
        sentence = (
            f"The importance ratio of rollouts by replicas of class {name} averaged {mean:.4f} over"
            f" the last {STEPS} steps (band {limits.ratio_low:g} to {limits.ratio_high:g})."
        )
        fix = "Drain the replicas of that class, or widen alerts.ratio_low and alerts.ratio_high."
        limit = limits.ratio_low if mean < limits.ratio_low else limits.ratio_high
        found.append(
            Finding(
                kind="ratio", severity="warning", sentence=sentence, fix=fix, subject=name,
                value=mean, limit=limit,
            )
        )  # fmt: skip
    return found


def _mean_of_steps(facts: RunFacts, name: str) -> float | None:
    """Of the last STEPS that logged it; None for fewer."""
    values = [v for step in facts.steps if (v := t.value_of(step, name)) is not None][-STEPS:]
    return sum(values) / STEPS if len(values) == STEPS else None


def _stale_drops(facts: RunFacts, limits: Limits) -> list[Finding]:
    steps = facts.steps[-STEPS - 1 :]
    totals = [v for step in steps if (v := t.value_of(step, t.DROPPED_STALE)) is not None]
    if len(totals) < 2:
        return []
    dropped = totals[-1] - totals[0]
    trained = sum(t.value_of(step, t.SAMPLES) or 0.0 for step in steps[1:])
    if dropped <= 0 or dropped + trained <= 0:
        return []
    share = dropped / (dropped + trained)
    if share <= limits.stale_share:
        return []
    sentence = (
        f"{share:.0%} of the rollouts of the last {len(steps) - 1} steps were too old and were"
        " dropped."
    )
    fix = "Raise max_staleness, lower max_inflight_tasks, or run fewer replicas."
    return [
        Finding(
            kind="stale-drops", severity="warning", sentence=sentence, fix=fix, value=share,
            limit=limits.stale_share,
        )
    ]  # fmt: skip


def _slow_syncs(facts: RunFacts, limits: Limits) -> list[Finding]:
    took = [s for row in facts.syncs[:STEPS] if (s := _took_s(row)) is not None]
    if len(took) < FEWEST_SYNCS:
        return []
    p95_s = _quantile(took, 0.95)
    if p95_s <= limits.sync_p95_s:
        return []
    sentence = (
        f"95 % of the last {len(took)} syncs took up to {p95_s:.1f} s, and the budget is"
        f" {limits.sync_p95_s:g} s."
    )
    fix = "See the syncs for the replica and the phase that take longest."
    return [
        Finding(
            kind="slow-sync", severity="warning", sentence=sentence, fix=fix, value=p95_s,
            limit=limits.sync_p95_s,
        )
    ]  # fmt: skip


def _took_s(row: SyncRow) -> float | None:
    return row.quorum_s if row.quorum_s is not None else row.elapsed_s


def _slow_mounts(facts: RunFacts, limits: Limits) -> list[Finding]:
    reads: dict[str, list[float]] = {}
    writes: list[float] = []
    for row in facts.syncs[:STEPS]:
        written_s = row.trainer_phases_s.get("copy", 0.0) + row.trainer_phases_s.get("commit", 0.0)
        writes.append(written_s)
        for one in row.replicas:
            if one.ok and "read" in one.phases_s:
                reads.setdefault(one.name, []).append(one.phases_s["read"])
    found = [_slow_mount(name, "read", taken, limits) for name, taken in reads.items()]
    found.append(_slow_mount("", "write", writes, limits))
    return [one for one in found if one is not None]


def _slow_mount(
    name: str, verb: Literal["read", "write"], all_s: Sequence[float], limits: Limits
) -> Finding | None:
    took_s = _quantile(all_s[:LOADS], 0.5) if len(all_s) >= LOADS else 0.0
    if took_s <= limits.mount_slow_s:
        return None
    whose = name or "The trainer"
    return Finding(
        kind="slow-mount",
        severity="warning",
        sentence=f"{whose} took {took_s:.1f} s to {verb} an adapter (median of the last {LOADS}).",
        fix="See the bucket's region and the log of the mount; replicas may have link as source.",
        subject=name,
        value=took_s,
        limit=limits.mount_slow_s,
    )


def _retries(facts: RunFacts, limits: Limits) -> list[Finding]:
    tries = facts.tries_per_success
    if tries is None or tries <= limits.tries_per_success:
        return []
    return [
        Finding(
            kind="retries",
            severity="warning",
            sentence=f"A rollout took {tries:.2f} tries, within {WINDOW_S / 60:.0f} minutes.",
            fix="See the events for replicas that are lost again and again, and drain those.",
            value=tries,
            limit=limits.tries_per_success,
        )
    ]


def _skewed(facts: RunFacts, limits: Limits) -> list[Finding]:
    return [
        Finding(
            kind="clock-skew",
            severity="warning",
            sentence=f"The clock of {one.name} is {one.skew_s:+.1f} s off the proxy's.",
            fix="Have chrony or systemd-timesyncd keep it; credentials of S3 fail beyond minutes.",
            subject=one.name,
            value=one.skew_s,
            limit=limits.clock_skew_s,
        )
        for one in facts.replicas
        if one.skew_s is not None and abs(one.skew_s) > limits.clock_skew_s
    ]


def _short_of_slots(facts: RunFacts) -> list[Finding]:
    return [
        Finding(
            kind="slots-short",
            severity="warning",
            sentence=f"{one.name} has too few adapter slots and is not used: {one.slots_fault}.",
            fix="Raise engine.max_loras there, or lower max_staleness.",
            subject=one.name,
        )
        for one in facts.replicas
        if one.slots_fault
    ]


def _quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Tries:
    """How often a rollout is tried until it is answered, over a window of time."""

    _marks: list[tuple[float, int, int]] = field(default_factory=list)  # time, retried, answered

    def read(self, retried: int, answered: int, now_s: float) -> float | None:
        """Tries for each success within the last WINDOW_S; None for too few of them."""
        self._marks.append((now_s, retried, answered))
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - WINDOW_S:
            del self._marks[0]
        _, retried_then, answered_then = self._marks[0]
        fresh, again = answered - answered_then, retried - retried_then
        if fresh < FEWEST_TRIES:
            return None
        return (fresh + again) / fresh


@dataclass(slots=True)
class Board:
    """The alerts of one run that stand."""

    _standing: dict[tuple[Kind, str], Alert] = field(default_factory=dict)
    _seen: dict[tuple[Kind, str], float] = field(default_factory=dict)

    @property
    def alerts(self) -> list[Alert]:
        """The worst first, then the oldest."""
        return sorted(
            self._standing.values(), key=lambda one: (one.severity != "error", one.since_unix_s)
        )

    def update(
        self, found: Sequence[Finding], *, now_s: float, now_unix_s: float
    ) -> tuple[list[Alert], list[Alert]]:
        """What is new, and what was right again for CLEAR_AFTER_S."""
        raised = []
        for one in found:
            key = (one.kind, one.subject)
            self._seen[key] = now_s
            before = self._standing.get(key)
            since = before.since_unix_s if before is not None else now_unix_s
            fields = {name: getattr(one, name) for name in Finding.__struct_fields__}
            alert = self._standing[key] = Alert(**fields, since_unix_s=round(since, 3))
            if before is None:
                raised.append(alert)
        over = [key for key, seen in self._seen.items() if now_s - seen >= CLEAR_AFTER_S]
        for key in over:
            del self._seen[key]
        return raised, [self._standing.pop(key) for key in over]
