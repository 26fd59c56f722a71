"""All that is known of a run so far, folded from what its trainer records and its proxy sees.

The proxy keeps one for each run, a report makes one of a history file: series of all metrics, the
newest steps as they were logged, syncs by replica and phase, events, phase and limits. Bounded,
however long the run becomes.

Pure: the clock's reading comes with each record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from asyncgrpo_agent.core.run_events import Event, EventLog, Kind, Severity
from asyncgrpo_agent.core.series import SeriesStore
from asyncgrpo_agent.core.sync_rows import ReplicaSync, SyncLog, SyncRow

RECENT_STEPS: Final = 64
LOST_STATES: Final = ("GONE", "SUSPECT")
TRAFFIC: Final = ("ready", "waiting", "retried", "held_s")


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """TRL's metrics of one step."""

    step: int
    unix_s: float
    values: dict[str, float]


Told = StepRow | SyncRow | Event
"""What a record adds, for whoever follows the run."""


@dataclass(slots=True)
class Story:
    """`since_unix_s`: what others than the trainer saw before then is known from its records."""

    events: EventLog = field(default_factory=EventLog)
    series: SeriesStore = field(default_factory=SeriesStore)
    syncs: SyncLog = field(default_factory=SyncLog)
    recent: deque[StepRow] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    since_unix_s: float = float("inf")
    phase: str = ""
    max_steps: int = 0
    started_unix_s: float = 0.0
    finished: str = ""  # why the run is over
    failed: bool = False
    attempt: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)  # of TRL: queue_maxsize, ...
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    totals: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)  # the model, the settings, the host
    traffic: Mapping[str, Any] = field(default_factory=dict)  # what the proxy counted, newest
    _states: dict[str, tuple[str, float]] = field(default_factory=dict)  # replica -> since when

    @property
    def step(self) -> int:
        return max(0, self.series.last_step)

    def value(self, name: str) -> float | None:
        """The newest of one metric, by exact name."""
        for row in reversed(self.recent):
            if name in row.values:
                return row.values[name]
        return None

    # --- what the trainer recorded --------------------------------------------------------

    def add(self, record: Mapping[str, Any]) -> list[Told]:
        """Fold one record of a history in. One that makes no sense is skipped."""
        try:
            return self._add(record)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            return []

    def _add(self, record: Mapping[str, Any]) -> list[Told]:
        at = float(record["t"])
        self.started_unix_s = self.started_unix_s or at
        match record["kind"]:
            case "metrics":
                return self._step(record, at)
            case "ack":
                outcome = ReplicaSync(
                    name=str(record["replica"]),
                    ok=bool(record["ok"]),
                    reason=str(record["reason"]),
                    since_announced_s=round(float(record["seconds"]), 4),
                    phases_s=_numbers(record["phases_s"]),
                )
                row = self.syncs.told(str(record["adapter"]), outcome)
                return [] if row is None else [row]
            case "sync":
                return self._sync(record, at)
            case "replica":
                return self._replica(record, at)
            case "limits":
                self.limits = {k: v for k, v in record.items() if k not in ("t", "kind")}
            case "eval":
                self.evaluations = [*self.evaluations[-199:], dict(record)]
                text = (
                    f"Evaluation {record['when']} training: {record['accuracy']:.3f} of"
                    f" {record['samples']} answers"
                )
                return [self._say("run", "info", "run.evaluated", text, at)]
            case "totals":
                self.totals = dict(record)
            case "about":
                self.about = dict(record)
            case "traffic":
                self._traffic(record, at)
            case _:
                return self._course(record, at)
        return []

    def _step(self, record: Mapping[str, Any], at: float) -> list[Told]:
        self.max_steps = int(record.get("max_steps") or self.max_steps)
        row = StepRow(
            step=int(record["step"]), unix_s=round(at, 3), values=_numbers(record["values"])
        )
        self.series.add(row.step, at, row.values)
        self.recent.append(row)
        return [row]

    def _traffic(self, record: Mapping[str, Any], at: float) -> None:
        self.traffic = dict(record)
        counted = {f"agrpo/{name}": float(record[name]) for name in TRAFFIC if name in record}
        self.series.add(int(record["step"]), at, counted)

    def sample(self, values: Mapping[str, float], now_unix_s: float) -> None:
        """What the proxy measured at the newest step."""
        if self.series.last_step >= 0:
            self.series.add(self.series.last_step, now_unix_s, values)

    def _sync(self, record: Mapping[str, Any], at: float) -> list[Told]:
        adapter, report = str(record["adapter"]), record.get("report") or {}
        seconds = float(record["seconds"])
        self.syncs.published(
            adapter,
            started_unix_s=at - seconds,
            size_bytes=int(record["bytes"]),
            phases_s=_numbers(record["phases_s"]),
        )
        row = self.syncs.ended(adapter, elapsed_s=seconds, ended_unix_s=at)
        if row is None:
            return []
        if at >= self.since_unix_s:  # the proxy has counted it
            return [row]
        timed_out = bool(report.get("timed_out", not report))
        quorum_s = float(report.get("elapsed_s", seconds))
        row = self.syncs.decided(adapter, quorum_s=quorum_s, timed_out=timed_out, reason="") or row
        return [row, self.synced(row, at)]

    def synced(self, row: SyncRow, at: float) -> Event:
        """The event of a sync that is done."""
        took_s = row.quorum_s if row.quorum_s is not None else row.elapsed_s
        late = [one.name for one in row.replicas if not one.ok]
        what = "timed out" if row.timed_out else "reached its quorum"
        text = f"Sync of version {row.version} {what} after {took_s or 0.0:.2f} s"
        if row.reason:
            text += f": {row.reason}"
        severity: Severity = "warning" if row.timed_out or late else "info"
        fields = {"version": row.version, "adapter": row.adapter, "bytes": row.bytes}
        return self._say("sync", severity, "sync.done", text, at, duration_s=took_s, fields=fields)

    def _replica(self, record: Mapping[str, Any], at: float) -> list[Told]:
        if at >= self.since_unix_s:  # the proxy has seen that itself
            return []
        return [self.replica_moved(record["name"], record["state"], record["reason"], at)]

    def replica_moved(
        self, name: str, state: str, reason: str, at: float, *, is_last: bool = False
    ) -> Event:
        """A replica's state changed. `is_last`: it was lost, and no other is ready."""
        before, since = self._states.pop(name, ("", at))
        if state != "GONE":
            self._states[name] = (state, at)
        gentle = state == "GONE" and before == "DRAINING"
        severity: Severity = "warning" if state in LOST_STATES and not gentle else "info"
        spent_s = at - since if before else None
        text = f"{name} is {state}: {reason}"
        if is_last:
            severity, text = "error", f"{text}; no replica is ready now"
        return self._say(
            *("replica", severity, "replica.state", text, at),
            replica=name,
            duration_s=spent_s,
            fields={"before": before, "after": state},
        )

    def _course(self, record: Mapping[str, Any], at: float) -> list[Told]:
        """The run as a whole."""
        match record["kind"]:
            case "phase":
                self.phase = str(record["phase"])
                return [self._say("trainer", "info", "trainer.phase", f"Phase {self.phase}", at)]
            case "started":
                self.attempt, self.finished = str(record["attempt"]), ""
                self.failed = False
                self.max_steps = int(record.get("max_steps") or self.max_steps)
                text = f"Training starts as attempt {self.attempt}"
                return [self._say("run", "info", "run.started", text, at)]
            case "setup":
                self.versions = record.get("versions") or {}
            case "resumed":
                self.series.cut(int(record["step"]))
                self.recent.clear()
                text = f"Training goes on from step {record['step']} ({record['source']})"
                return [self._say("run", "info", "run.resumed", text, at)]
            case "restarting":
                text = f"TRL is started again in {record['in_s']:.0f} s: {record['reason']}"
                return [self._say("trainer", "warning", "trainer.restarting", text, at)]
            case "error":
                text = str(record["what"]) + (f" ({record['fix']})" if record.get("fix") else "")
                return [self._say("trainer", "error", "trainer.error", text, at)]
            case "ended":
                return [self.ended(str(record["reason"]), ok=bool(record["ok"]), at=at)]
        return []

    def ended(self, reason: str, *, ok: bool, at: float) -> Event:
        """The trainer has come to its end."""
        self.failed, self.finished = not ok, reason or ("finished" if ok else "failed")
        severity: Severity = "info" if ok else "error"
        text = f"The run is over: {reason}" if ok else f"The trainer ended: {reason}"
        return self._say("run", severity, "run.ended", text, at)

    # --- what the proxy saw ---------------------------------------------------------------

    def _say(
        self,
        kind: Kind,
        severity: Severity,
        name: str,
        text: str,
        at: float,
        *,
        replica: str | None = None,
        duration_s: float | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        return self.events.add(
            kind,
            severity,
            name,
            text,
            t_unix_s=at,
            replica=replica,
            duration_s=duration_s,
            fields=fields,
        )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
