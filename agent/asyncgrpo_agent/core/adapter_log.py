"""What a run's history says of its adapters: when each step was done, who holds which, which did
well, and whether the attempt has ended.

Pure: one record after the other goes in, as `store.history` reads them. Times are seconds since
`saved`, the moment at which TRL handed the adapter over, and on the trainer's clock: what a replica
tells of itself are durations, and they are counted back from when the trainer heard of its ack.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.progress import REWARD, STALENESS

NEIGHBOURS: Final = 2  # versions on each side that a version's reward is averaged over
MIN_STEPS: Final = 3  # fewer are luck; they count only where no version has more
_TRL_NAME_RE: Final = re.compile(r"trl-policy-v(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """How an adapter came to one replica, or the reason why not. None: not recorded."""

    replica: str
    ok: bool
    reason: str = ""
    visible_s: float | None = None
    """Its commit was found in the bucket and verified."""
    copied_s: float | None = None
    """Its files were on the replica's disk; None if an earlier start had left them there."""
    verified_s: float | None = None
    loaded_s: float | None = None
    """vLLM said that it has it."""
    acked_s: float | None = None
    """The trainer heard so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTimes:
    """The way of one adapter. None: not recorded, or it has not happened."""

    saved_unix_s: float | None = None
    uploaded_s: float | None = None
    """Its commit was written: the adapter exists."""
    announced_s: float | None = None
    """The proxy was told; None if the link was down then."""
    replicas: tuple[ReplicaTimes, ...] = ()
    """By name."""

    def slowest(self) -> ReplicaTimes | None:
        """The replica that acked last."""
        acked = [times for times in self.replicas if times.ok and times.acked_s is not None]
        return max(acked, key=lambda times: times.acked_s or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A version, and what speaks for it."""

    version: int
    reason: str


@dataclass(slots=True)
class _Attempt:
    """What was recorded between two starts."""

    newest: int = 0  # the version that is trained on now
    live: list[str] = field(default_factory=list)
    ended_well: bool = False
    rewards: dict[int, list[float]] = field(default_factory=dict)  # by version
    accuracies: dict[int, float] = field(default_factory=dict)  # by version


class AdapterLog:
    """The history up to the last record."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempt] = {}
        self._current: _Attempt | None = None
        self._published: dict[str, Mapping[str, Any]] = {}  # by physical name
        self._acks: dict[str, dict[str, Mapping[str, Any]]] = {}  # by physical name and replica
        self._holdings: dict[str, list[str]] = {}  # by replica

    def add(self, record: Mapping[str, Any]) -> None:
        """Fold one record in; kinds that are not known are skipped."""
        match record["kind"]:
            case "phase" if record["phase"] == "checking":  # the first word of a trainer
                self._current = None
                self._holdings.clear()
            case "started":
                self._current = self._attempt(record["attempt"])
            case "published":
                self._add_published(record)
            case "retired":
                self._set_live(record["live"])
            case "ack":
                self._add_ack(record)
            case "holds":
                self._holdings[record["replica"]] = list(record["loaded"])
            case "replica" if record["state"] == "GONE":
                self._holdings.pop(record["name"], None)
            case "metrics":
                self._add_step(record["values"])
            case "eval":
                self._add_evaluation(record)
            case "ended":
                self._end(ok=bool(record["ok"]))

    # --- one adapter ----------------------------------------------------------------------

    def times(self, name: str) -> AdapterTimes:
        """By physical name."""
        published = self._published.get(name)
        if published is None:
            return AdapterTimes()
        saved_unix_s = float(published["t"]) - float(published["seconds"])
        acks = self._acks.get(name, {})
        return AdapterTimes(
            saved_unix_s=saved_unix_s,
            uploaded_s=published["uploaded_s"],
            announced_s=published["announced_s"],
            replicas=tuple(_replica_times(acks[one], saved_unix_s) for one in sorted(acks)),
        )

    def holders(self, name: str) -> list[str]:
        """The replicas that hold it, as far as the trainer has heard; none after its end."""
        return sorted(replica for replica, loaded in self._holdings.items() if name in loaded)

    # --- one attempt ----------------------------------------------------------------------

    def live(self, attempt: str) -> list[str] | None:
        """The names that a request may still use; None for an attempt that is not recorded."""
        found = self._attempts.get(attempt)
        return None if found is None else found.live

    def ended_well(self, attempt: str) -> bool:
        return attempt in self._attempts and self._attempts[attempt].ended_well

    def best(self, attempt: str, versions: Collection[int]) -> Choice | None:
        """Of `versions` the one that did best; None if nothing is recorded of any.

        If some were evaluated: of those, the one with the highest accuracy. Else the one with the
        highest reward, which is the mean over all training steps on samples of this version and of
        the two before and the two after it. What a step trains on was sampled `staleness_mean`
        versions before the newest of that moment. Of equals the newest is taken.
        """
        found = self._attempts.get(attempt, _Attempt())
        accuracies = {v: a for v, a in found.accuracies.items() if v in versions}
        if accuracies:
            version = max(accuracies, key=lambda v: (accuracies[v], v))
            of = f"best of {len(accuracies)} evaluated"
            return Choice(version=version, reason=f"accuracy {accuracies[version]:.3f}, {of}")
        around = {v: _around(found.rewards, v) for v in versions}
        enough = min(MIN_STEPS, max(map(len, around.values()), default=0))
        means = {v: sum(r) / len(r) for v, r in around.items() if len(r) >= max(1, enough)}
        if not means:
            return None
        version = max(means, key=lambda v: (means[v], v))
        over = f"mean of {len(around[version])} training steps around it"
        return Choice(version=version, reason=f"reward {means[version]:.3f}, {over}")

    # --- folding --------------------------------------------------------------------------

    def _attempt(self, name: str) -> _Attempt:
        return self._attempts.setdefault(name, _Attempt())

    def _add_published(self, record: Mapping[str, Any]) -> None:
        self._published[record["adapter"]] = record
        parts = parse_name(record["adapter"])
        if parts is not None:
            self._current = self._attempt(parts.attempt)
            self._current.newest = parts.version
            self._current.live = list(record["live"])

    def _set_live(self, live: list[str]) -> None:
        if self._current is not None:
            self._current.live = list(live)

    def _add_ack(self, record: Mapping[str, Any]) -> None:
        """The first good one stays: a later one is of an adapter that was asked for once more."""
        acks = self._acks.setdefault(record["adapter"], {})
        known = acks.get(record["replica"])
        if known is None or not known["ok"]:
            acks[record["replica"]] = record

    def _add_step(self, values: Mapping[str, float]) -> None:
        if self._current is None or REWARD not in values:
            return
        version = max(0, self._current.newest - round(values.get(STALENESS, 0.0)))
        self._current.rewards.setdefault(version, []).append(values[REWARD])

    def _add_evaluation(self, record: Mapping[str, Any]) -> None:
        match = _TRL_NAME_RE.fullmatch(str(record.get("name", "")))
        if self._current is not None and match is not None:  # else it was the base model
            self._current.accuracies[int(match[1])] = float(record["accuracy"])

    def _end(self, *, ok: bool) -> None:
        """Nothing more is asked for, and nobody tells any more what replicas hold."""
        self._holdings.clear()
        if self._current is not None:
            self._current.ended_well = ok
            self._current.live = []
        self._current = None


def _around(rewards: Mapping[int, list[float]], version: int) -> list[float]:
    near = range(version - NEIGHBOURS, version + NEIGHBOURS + 1)
    return [reward for one in near for reward in rewards.get(one, ())]


def _replica_times(ack: Mapping[str, Any], saved_unix_s: float) -> ReplicaTimes:
    acked_s = float(ack["t"]) - saved_unix_s
    phases_s: Mapping[str, float] = ack["phases_s"]
    noticed_s = acked_s - phases_s["acked"] if "acked" in phases_s else None

    def after(phase: str, *less: str) -> float | None:
        """The end of a phase that is told as seconds since the replica noticed the adapter."""
        if noticed_s is None or any(name not in phases_s for name in (phase, *less)):
            return None
        return noticed_s + phases_s[phase] - sum(phases_s[name] for name in less)

    return ReplicaTimes(
        replica=ack["replica"],
        ok=bool(ack["ok"]),
        reason=str(ack["reason"]),
        visible_s=after("visible"),
        copied_s=after("staged", "check", "sync"),
        verified_s=after("staged"),
        loaded_s=after("total"),
        acked_s=acked_s if ack["ok"] else None,
    )
