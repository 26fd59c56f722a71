"""The replicas of one run as the proxy sees them: states, what they hold, what they do.

JOINING (registered, engine not up) -> READY -> DRAINING -> GONE, with SUSPECT when the engine
runs requests but makes no token, or fails requests in a row. STALE is not a state of a replica but
of a (replica, adapter) pair: it has not acked that adapter.

Pure: events and `now` (monotonic seconds) go in, transitions with reasons come out. Invariant:
`in_flight` equals the number of rollouts between `started` and `finished`, and is never negative.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

STUCK_AFTER_S: Final = 15.0  # requests running and no token made for so long: the engine hangs
FAILURES_IN_A_ROW: Final = 3
PROBE_EVERY_S: Final = 5.0  # a SUSPECT replica gets one request at a time, this often
_RATE_WEIGHT: Final = 0.3  # of the newest sample in the running mean of tokens a second


class State(enum.Enum):
    JOINING = "JOINING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DRAINING = "DRAINING"
    GONE = "GONE"


class Engine(Protocol):
    """The facts about a replica's vLLM that all replicas of a run must share."""

    @property
    def base_model(self) -> str: ...
    @property
    def model_digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def engine_mismatch(first: Engine, other: Engine) -> str | None:
    """Why `other` cannot serve the run that `first` serves, or None."""
    for what in ("base_model", "model_digest", "dtype"):
        ours, theirs = getattr(first, what), getattr(other, what)
        if ours != theirs:
            return f"its {what.replace('_', ' ')} is {theirs!r}, the run's is {ours!r}"
    return None


@dataclass(slots=True, kw_only=True)
class Replica:
    """One registration of one replica. `since` and `progress_at` are monotonic seconds."""

    name: str
    instance: str
    capacity: int
    since: float
    state: State = State.JOINING
    reason: str = "engine is starting"
    loaded: frozenset[str] = frozenset()
    in_flight: int = 0
    in_flight_tokens: int = 0
    requests: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    running: int = 0
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    progress_at: float = 0.0
    counted_at: float = 0.0
    probe_at: float = 0.0
    paused_s: float = 0.0
    hangs: bool = False  # SUSPECT because no token came: what it runs is sent elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A replica changed its state."""

    replica: str
    before: State
    after: State
    reason: str


@dataclass(slots=True)
class Fleet:
    """All replicas of one run by name."""

    replicas: dict[str, Replica] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas.values())

    def join(self, name: str, instance: str, capacity: int, now: float) -> Replica:
        """A new registration; it replaces an older one of the same name."""
        replica = Replica(name=name, instance=instance, capacity=capacity, since=now)
        self.replicas[name] = replica
        return replica

    def leave(self, name: str, instance: str, now: float, reason: str) -> Transition | None:
        """The link of that registration ended; a newer registration is not touched."""
        replica = self.replicas.get(name)
        if replica is None or replica.instance != instance:
            return None
        del self.replicas[name]
        return _move(replica, State.GONE, reason, now)


def _move(replica: Replica, state: State, reason: str, now: float) -> Transition | None:
    before = replica.state
    replica.reason = reason
    if before is state:
        return None
    replica.state, replica.since = state, now
    return Transition(replica=replica.name, before=before, after=state, reason=reason)


def engine_up(replica: Replica, now: float) -> Transition | None:
    replica.progress_at = replica.counted_at = now
    replica.failures_in_a_row = 0
    if replica.state is State.DRAINING:
        return None
    return _move(replica, State.READY, "engine is up", now)


def engine_down(replica: Replica, reason: str, now: float) -> Transition | None:
    replica.loaded = frozenset()
    if replica.state is State.DRAINING:
        return None
    return _move(replica, State.JOINING, reason, now)


def drain(replica: Replica, reason: str, now: float) -> Transition | None:
    return _move(replica, State.DRAINING, reason, now)


def progressed(replica: Replica, running: int, generated_tokens: int, now: float) -> None:
    """vLLM's own counters arrived; they may restart from zero with the engine."""
    made = generated_tokens - replica.generated_tokens
    seconds = now - replica.counted_at
    if made > 0 and seconds > 0:
        rate = made / seconds
        weight = _RATE_WEIGHT if replica.tokens_per_s else 1.0
        replica.tokens_per_s += weight * (rate - replica.tokens_per_s)
    if made != 0 or running == 0:
        replica.progress_at = now
    replica.running = running
    replica.generated_tokens = generated_tokens
    replica.counted_at = now


def check_progress(replica: Replica, now: float) -> Transition | None:
    """SUSPECT when requests run and no token comes; READY again when tokens do."""
    silent = now - replica.counted_at >= STUCK_AFTER_S  # not even its counters come
    if replica.state is State.READY and replica.in_flight and (replica.running or silent):
        quiet_s = now - replica.progress_at
        if quiet_s >= STUCK_AFTER_S:
            reason = f"{replica.in_flight} requests run but no token came for {quiet_s:.0f} s"
            replica.hangs = True
            return _move(replica, State.SUSPECT, reason, now)
    if (
        replica.state is State.SUSPECT
        and replica.failures_in_a_row == 0
        and replica.progress_at > replica.since
    ):
        replica.hangs = False
        return _move(replica, State.READY, "tokens come again", now)
    return None


def started(replica: Replica, tokens: int, now: float) -> None:
    if replica.in_flight == 0:
        replica.progress_at = max(replica.progress_at, now)
    replica.in_flight += 1
    replica.in_flight_tokens += tokens
    replica.requests += 1
    if replica.state is State.SUSPECT:
        replica.probe_at = now


def finished(replica: Replica, tokens: int, *, ok: bool | None, now: float) -> Transition | None:
    """A rollout ended. `ok` None: it says nothing about the replica (the client went away)."""
    replica.in_flight -= 1
    replica.in_flight_tokens -= tokens
    if ok is None:
        return None
    if ok:
        replica.failures_in_a_row = 0
        replica.hangs = False
        if replica.state is State.SUSPECT:
            return _move(replica, State.READY, "a request succeeded", now)
        return None
    replica.failures += 1
    replica.failures_in_a_row += 1
    if replica.state is State.READY and replica.failures_in_a_row >= FAILURES_IN_A_ROW:
        reason = f"{replica.failures_in_a_row} requests failed in a row"
        return _move(replica, State.SUSPECT, reason, now)
    return None


def takes_requests(replica: Replica, now: float) -> bool:
    """READY with room, or SUSPECT, idle and due for a probe."""
    if replica.in_flight >= replica.capacity:
        return False
    if replica.state is State.READY:
        return True
    probe_due = now - max(replica.probe_at, replica.since) >= PROBE_EVERY_S
    return replica.state is State.SUSPECT and replica.in_flight == 0 and probe_due
