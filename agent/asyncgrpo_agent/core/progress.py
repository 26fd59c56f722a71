"""What has happened in a run so far, folded from its history, for a live view and for a report.

Pure: one record after the other goes in. All names of TRL's metrics that the product shows are in
this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

REWARD: Final = "reward"
RATIO: Final = "ratio"
STALENESS: Final = "sample/staleness_mean"
STEP_S: Final = "perf/step_s"


@dataclass(frozen=True, slots=True)
class Step:
    """TRL's metrics of one optimizer step."""

    step: int
    at_unix_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One publication: how long TRL's load call took, and who had it by then."""

    version: int
    at_unix_s: float
    seconds: float
    acked: tuple[str, ...]
    missing: tuple[str, ...]
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Sampled answers to held-out prompts."""

    when: str
    accuracy: float
    samples: int
    prompts: int


@dataclass(slots=True)
class ReplicaProgress:
    state: str = "JOINING"
    reason: str = ""
    acks_s: list[float] = field(default_factory=list)
    refusals: int = 0
    unverified: bool = False  # nobody checks the adapters that it loads


@dataclass(slots=True)
class Progress:
    """The run up to the last record."""

    phase: str = "starting"
    started_unix_s: float = 0.0
    max_steps: int = 0
    steps: list[Step] = field(default_factory=list)
    syncs: list[SyncRow] = field(default_factory=list)
    replicas: dict[str, ReplicaProgress] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    ended: str = ""
    succeeded: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Fold one record in; kinds that are not known are skipped."""
        at = float(record["t"])
        self.started_unix_s = self.started_unix_s or at
        match record["kind"]:
            case "phase":
                self.phase = str(record["phase"])
            case "metrics":
                self._add_step(record, at)
            case "sync":
                self._add_sync(record, at)
            case "ack":
                self._add_ack(record)
            case "replica":
                replica = self._replica(record["name"])
                replica.state, replica.reason = record["state"], record["reason"]
                replica.unverified = bool(record.get("unverified", replica.unverified))
            case "eval":
                self.evaluations[record["when"]] = Evaluation(
                    record["when"], record["accuracy"], record["samples"], record["prompts"]
                )
            case "totals":
                self.totals = record
            case "ended":
                self.ended, self.succeeded = str(record["reason"]), bool(record["ok"])
                self.phase = "done" if self.succeeded else "stopped"

    def series(self, name: str) -> list[float]:
        """One metric over the steps that logged it."""
        return [step.values[name] for step in self.steps if name in step.values]

    def _replica(self, name: str) -> ReplicaProgress:
        return self.replicas.setdefault(name, ReplicaProgress())

    def _add_step(self, record: Mapping[str, Any], at: float) -> None:
        self.max_steps = int(record.get("max_steps") or self.max_steps)
        step = int(record["step"])
        if REWARD in record["values"] or RATIO in record["values"]:
            self.steps.append(Step(step, at, record["values"]))

    def _add_sync(self, record: Mapping[str, Any], at: float) -> None:
        report = record.get("report") or {}
        self.syncs.append(
            SyncRow(
                version=record["version"],
                at_unix_s=at,
                seconds=record["seconds"],
                acked=tuple(report.get("acked", ())),
                missing=tuple(report.get("missing", ())),
                timed_out=bool(report.get("timed_out", True)),
            )
        )

    def _add_ack(self, record: Mapping[str, Any]) -> None:
        replica = self._replica(record["replica"])
        if not record["ok"]:
            replica.refusals += 1
            return
        replica.acks_s.append(record["seconds"])


def quarter_means(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last quarter; (0, 0) for less than four values."""
    size = len(values) // 4
    if size == 0:
        return 0.0, 0.0
    return sum(values[:size]) / size, sum(values[-size:]) / size


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def sparkline(values: list[float], width: int) -> str:
    """A line of block characters, the mean of each of `width` equal parts, on a scale 0 to 1."""
    if not values:
        return ""
    blocks = "▁▂▃▄▅▆▇█"
    parts = min(width, len(values))
    means = []
    for part in range(parts):
        chunk = values[part * len(values) // parts : (part + 1) * len(values) // parts]
        means.append(sum(chunk) / len(chunk))
    return "".join(blocks[min(7, max(0, int(mean * 8)))] for mean in means)
