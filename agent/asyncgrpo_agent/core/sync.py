"""When a publication counts as synced: half of the capacity that was eligible when it began.

The capacity is counted once, at the announcement, so that a late joiner cannot move the goal. A
replica that leaves meanwhile takes its share along. The load call of TRL returns as soon as the
quorum has acked, everybody has answered, or the deadline has passed: whatever happens to replicas,
it never fails for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`done` with the `reason`; `timed_out` when only the deadline ended it."""

    done: bool
    timed_out: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Sync:
    """One publication on its way. `capacity` maps each replica asked to its capacity."""

    adapter: str
    started: float
    quorum: float
    timeout_s: float
    capacity: dict[str, int]
    acked: dict[str, float] = field(default_factory=dict)  # replica -> seconds since the start
    failed: dict[str, str] = field(default_factory=dict)  # replica -> reason

    @property
    def acked_capacity(self) -> int:
        return sum(self.capacity.get(name, 0) for name in self.acked)

    @property
    def eligible_capacity(self) -> int:
        return sum(self.capacity.values())

    @property
    def missing(self) -> list[str]:
        return [n for n in self.capacity if n not in self.acked and n not in self.failed]

    def ack(self, replica: str, now: float) -> None:
        self.failed.pop(replica, None)
        self.acked.setdefault(replica, now - self.started)

    def fail(self, replica: str, reason: str) -> None:
        if replica not in self.acked:
            self.failed[replica] = reason

    def gone(self, replica: str) -> None:
        if replica not in self.acked:
            self.capacity.pop(replica, None)
            self.failed.pop(replica, None)

    def deadline(self) -> float:
        return self.started + self.timeout_s

    def verdict(self, now: float, standing: Mapping[str, str] | None = None) -> Verdict:
        """`standing`: how far replicas have come, in words."""
        wanted = self.quorum * self.eligible_capacity
        share = f"{self.acked_capacity} of {self.eligible_capacity} rollout slots hold it"
        if not self.capacity:
            return Verdict(done=True, timed_out=False, reason="no replica is ready; requests wait")
        if self.acked_capacity >= wanted:
            return Verdict(done=True, timed_out=False, reason=share)
        if not self.missing:
            return Verdict(done=True, timed_out=False, reason=f"all have answered; {share}")
        if now >= self.deadline():
            told = standing or {}
            late = ", ".join(f"{n} ({told[n]})" if told.get(n) else n for n in self.missing)
            return Verdict(done=True, timed_out=True, reason=f"{share}; no answer from {late}")
        return Verdict(done=False, timed_out=False, reason=share)
