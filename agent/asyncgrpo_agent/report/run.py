"""A whole run, folded from its history: the story that the proxy keeps too, and what only somebody
who looks back asks for, which are its attempts and what each replica did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo_agent.core.story import LOST_STATES, Story
from asyncgrpo_agent.core.sync_rows import MAX_SYNCS

READY = "READY"


@dataclass(slots=True, kw_only=True)
class AttemptFacts:
    """One start of the trainer. `last_unix_s` is of its last record."""

    name: str = ""
    host: str = ""
    started_unix_s: float
    last_unix_s: float
    first_step: int = 0
    last_step: int = 0
    source: str = ""  # of the checkpoint that it went on from
    ended: str = ""  # why; "" if nobody could record that


@dataclass(slots=True, kw_only=True)
class ReplicaFacts:
    """Seconds are of the time that the trainer's agent saw."""

    name: str
    first_unix_s: float
    ready_s: float = 0.0
    joined: int = 0
    lost: int = 0
    last_reason: str = ""  # of the newest loss
    syncs: int = 0
    refused: int = 0
    acks_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SYNCS))
    requests: int | None = None
    failures: int | None = None


@dataclass(slots=True)
class Run:
    """Records go in, oldest first."""

    story: Story = field(default_factory=Story)
    attempts: list[AttemptFacts] = field(default_factory=list)
    replicas: dict[str, ReplicaFacts] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)  # steps
    abouts: list[Mapping[str, Any]] = field(default_factory=list)
    name: str = ""
    records: int = 0
    last_unix_s: float = 0.0
    _states: dict[str, str] = field(default_factory=dict)
    _next: AttemptFacts | None = None  # that has not trained yet

    def add_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """One that makes no sense is skipped."""
        self.story.add(record)
        try:
            at = float(record["t"])
            self._add(record, at)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            return
        self.records += 1
        self.last_unix_s = max(self.last_unix_s, at)

    def _add(self, record: Mapping[str, Any], at: float) -> None:
        if self.last_unix_s:
            self._credit(at - self.last_unix_s)
        if self.attempts:
            self.attempts[-1].last_unix_s = at
        match record["kind"]:
            case "about":
                self.abouts.append(record)
                self.name = str(record["run"])
            case "started":
                self._started(record, at)
            case "resumed":
                step = int(record["step"])
                self._next = AttemptFacts(
                    started_unix_s=at,
                    last_unix_s=at,
                    first_step=step,
                    source=str(record["source"]),
                )
                self.resumed_at.append(step)
            case "metrics" if self.attempts:
                self.attempts[-1].last_step = int(record["step"])
            case "ended":
                if self.attempts:
                    self.attempts[-1].ended = str(record["reason"])
                self._states.clear()
            case "replica":
                self._moved(str(record["name"]), str(record["state"]), str(record["reason"]), at)
            case "ack":
                replica = self._replica(str(record["replica"]), at)
                if record["ok"]:
                    replica.syncs += 1
                    replica.acks_s.append(float(record["seconds"]))
                else:
                    replica.refused += 1
            case "totals":
                for row in record["replicas"]:
                    replica = self._replica(str(row["name"]), at)
                    replica.requests = (replica.requests or 0) + int(row["requests"])
                    replica.failures = (replica.failures or 0) + int(row["failures"])

    def _started(self, record: Mapping[str, Any], at: float) -> None:
        found = self._next or AttemptFacts(started_unix_s=at, last_unix_s=at)
        self._next = None
        found.name, found.last_step = str(record["attempt"]), found.first_step
        found.host = str(self.abouts[-1].get("host", "")) if self.abouts else ""
        self.name = str(record.get("run") or self.name)
        self.attempts.append(found)

    def _moved(self, name: str, state: str, reason: str, at: float) -> None:
        before = self._states.pop(name, "")
        replica = self._replica(name, at)
        if state != "GONE":
            self._states[name] = state
            replica.joined += not before
        if state in LOST_STATES and not (state == "GONE" and before in ("DRAINING", "SUSPECT")):
            replica.lost += 1
            replica.last_reason = reason

    def _credit(self, seconds: float) -> None:
        for name, state in self._states.items():
            if state == READY:
                self.replicas[name].ready_s += max(0.0, seconds)

    def _replica(self, name: str, at: float) -> ReplicaFacts:
        return self.replicas.setdefault(name, ReplicaFacts(name=name, first_unix_s=at))
