"""The replicas of one run as the proxy sees them: states, what they hold, what they do.

JOINING (registered, engine not up) -> READY -> DRAINING -> GONE, with SUSPECT when the engine
runs requests but makes no token, or fails requests in a row or too large a share of them. STALE is
not a state of a replica but of a (replica, adapter) pair: it has not acked that adapter.

SUSPECT is an open breaker: one request at a time, a probe, goes there now and then, less often the
more of them fail; one success makes the replica READY again, with as little trust as a newcomer
has. Short of that, recent failures make it look slower than it is: one that fails at once always
has the least in flight, and would draw all traffic.

Pure: events and `now` (monotonic seconds) go in, transitions with reasons come out. Invariant:
`in_flight` equals the number of rollouts between `started` and `finished`, and is never negative.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from asyncgrpo_agent.core.speeds import SpeedMeter, weigh

STUCK_AFTER_S: Final = 15.0  # requests running and no token made for so long: the engine hangs
FAILURES_IN_A_ROW: Final = 3
FAILED_SHARE: Final = 0.4  # of recent requests: the breaker opens
PROBE_EVERY_S: Final = 5.0  # a SUSPECT replica gets one request at a time, this often at first ...
MAX_PROBE_S: Final = 40.0  # ... and this seldom at last
CALM_AFTER: Final = 16  # successes in a row, and earlier openings of the breaker are forgotten
NEWCOMER_ROLLOUTS: Final = 16  # in flight at a replica that has shown nothing: two groups
WEIGH_EVERY_S: Final = 1.0
_OUTCOME_WEIGHT: Final = 0.1  # of the newest outcome in the share of failures
_RATE_WEIGHT: Final = 0.3  # of the newest sample in the running mean of tokens a second


class State(enum.Enum):
    JOINING = "JOINING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DRAINING = "DRAINING"
    GONE = "GONE"


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
    generated_tokens: int = -1  # the engine's counter; -1 until it has come
    tokens_per_s: float = 0.0
    token_at: float = 0.0  # when a token was last made
    progress_at: float = 0.0  # the same, or when there was nothing to do: it is quiet since then
    counted_at: float = 0.0
    probe_at: float = 0.0
    paused_s: float = 0.0
    hangs: bool = False  # SUSPECT because no token came: what it runs is sent elsewhere
    failed_share: float = 0.0  # of recent requests
    successes_in_a_row: int = 0
    trips: int = 0  # of the breaker, and probes that failed, since the replica was last calm
    proven: int = NEWCOMER_ROLLOUTS  # rollouts that it may have in flight before the others have
    speed: float = 1.0  # tokens a second, comparable with other replicas'; see `speeds`
    meter: SpeedMeter = field(default_factory=SpeedMeter)
    seed_tokens_per_s: float = 0.0  # of one rollout alone, when it was found ready; 0: not known

    @property
    def health(self) -> float:
        """What recent failures leave of its speed."""
        return (1 - self.failed_share) ** 2


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
    _weighed_at: float = -math.inf

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas.values())

    def join(self, name: str, instance: str, capacity: int, now: float) -> Replica:
        """A new registration; it replaces an older one of the same name."""
        replica = Replica(name=name, instance=instance, capacity=capacity, since=now)
        self.replicas[name] = replica
        self._weighed_at = -math.inf
        return replica

    def leave(self, name: str, instance: str, now: float, reason: str) -> Transition | None:
        """The link of that registration ended; a newer registration is not touched."""
        replica = self.replicas.get(name)
        if replica is None or replica.instance != instance:
            return None
        del self.replicas[name]
        return _move(replica, State.GONE, reason, now)

    def weigh(self, now: float) -> None:
        """Compare the replicas' speeds, if that has not just been done."""
        if now - self._weighed_at >= WEIGH_EVERY_S:
            self._weighed_at = now
            weigh(self.replicas.values())


def _move(replica: Replica, state: State, reason: str, now: float) -> Transition | None:
    before = replica.state
    replica.reason = reason
    if before is state:
        return None
    if state is State.SUSPECT:
        replica.trips += 1
        replica.proven = NEWCOMER_ROLLOUTS
    replica.state, replica.since = state, now
    return Transition(replica=replica.name, before=before, after=state, reason=reason)


def engine_up(replica: Replica, now: float) -> Transition | None:
    replica.progress_at = replica.counted_at = now
    replica.failures_in_a_row = 0
    replica.failed_share = 0.0
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
    """vLLM's own counters arrived; they may restart from zero with the engine.

    The first ones of a registration only start the count: the engine may be older than the link.
    """
    known = replica.generated_tokens >= 0
    made = generated_tokens - replica.generated_tokens if known else 0
    seconds = now - replica.counted_at
    replica.meter.run(replica.in_flight, now)
    replica.meter.made(made)
    replica.proven = max(replica.proven, NEWCOMER_ROLLOUTS + 2 * replica.in_flight * (made > 0))
    if made > 0 and seconds > 0:
        rate = made / seconds
        weight = _RATE_WEIGHT if replica.tokens_per_s else 1.0
        replica.tokens_per_s += weight * (rate - replica.tokens_per_s)
    if made != 0:
        replica.token_at = now
    if made != 0 or running == 0 or not known:
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
    if replica.state is State.SUSPECT and _probe_hangs(replica, now):
        replica.hangs = True
        replica.trips += 1
        replica.probe_at = now
        reason = f"a probe, too, got no token for {STUCK_AFTER_S:.0f} s"
        return Transition(
            replica=replica.name, before=State.SUSPECT, after=State.SUSPECT, reason=reason
        )
    if (
        replica.state is State.SUSPECT
        and replica.failures_in_a_row == 0
        and replica.token_at > replica.since
    ):
        replica.hangs = False
        return _move(replica, State.READY, "tokens come again", now)
    return None


def _probe_hangs(replica: Replica, now: float) -> bool:
    """No token since the probe was sent, and that is long ago."""
    since = max(replica.probe_at, replica.progress_at)
    return bool(replica.in_flight) and now - since >= STUCK_AFTER_S


def started(replica: Replica, tokens: int, now: float) -> None:
    replica.meter.run(replica.in_flight, now)
    if replica.in_flight == 0:
        replica.progress_at = max(replica.progress_at, now)
    replica.in_flight += 1
    replica.in_flight_tokens += tokens
    replica.requests += 1
    if replica.state is State.SUSPECT:
        replica.probe_at = now


def finished(replica: Replica, tokens: int, *, ok: bool | None, now: float) -> Transition | None:
    """A rollout ended. `ok` None: it says nothing about the replica (the client went away)."""
    replica.meter.run(replica.in_flight, now)
    replica.in_flight -= 1
    replica.in_flight_tokens -= tokens
    if ok is None:
        return None
    health = replica.health
    replica.failed_share += _OUTCOME_WEIGHT * ((not ok) - replica.failed_share)
    replica.speed *= replica.health / health  # until the fleet is weighed again
    return _succeeded(replica, now) if ok else _failed(replica, now)


def _succeeded(replica: Replica, now: float) -> Transition | None:
    if replica.state is State.SUSPECT and not (replica.hangs or _is_probed(replica)):
        return None  # it began before the failures, and says nothing of new requests
    replica.failures_in_a_row = 0
    replica.hangs = False
    replica.proven += 1
    replica.successes_in_a_row += 1
    if replica.successes_in_a_row >= CALM_AFTER:
        replica.trips = 0
    if replica.state is not State.SUSPECT:
        return None
    replica.failed_share = min(replica.failed_share, FAILED_SHARE / 2)
    return _move(replica, State.READY, "a request succeeded", now)


def _is_probed(replica: Replica) -> bool:
    """What runs, or has just ended, is the probe: one is sent only when nothing else runs."""
    return replica.probe_at > replica.since


def _failed(replica: Replica, now: float) -> Transition | None:
    replica.failures += 1
    replica.failures_in_a_row += 1
    replica.successes_in_a_row = 0
    if replica.state is State.SUSPECT and _is_probed(replica):
        replica.trips += 1
    if replica.state is not State.READY:
        return None
    if replica.failures_in_a_row >= FAILURES_IN_A_ROW:
        reason = f"{replica.failures_in_a_row} requests failed in a row"
    elif replica.failed_share >= FAILED_SHARE:
        reason = f"{replica.failed_share:.0%} of the last requests failed"
    else:
        return None
    return _move(replica, State.SUSPECT, reason, now)


def takes_requests(replica: Replica, now: float) -> bool:
    """READY with room, or SUSPECT, idle and due for a probe."""
    if replica.in_flight >= replica.capacity:
        return False
    if replica.state is State.READY:
        return True
    if replica.state is not State.SUSPECT or replica.in_flight:
        return False
    doubled = min(max(0, replica.trips - 1), 8)
    wait_s = min(math.ldexp(PROBE_EVERY_S, doubled), MAX_PROBE_S)
    return now - max(replica.probe_at, replica.since) >= wait_s
