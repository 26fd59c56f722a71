"""How much is logged, whoever causes it: bounds for lines of one event and for bytes of one child.

A peer that was let in may be a stolen one, and can make an agent say the same thing without end.
Each event has a bucket of lines for each peer, and one for all peers together, since a peer may
call itself many things. What is held back is counted for each event, and the count is told once in
WINDOW_S. Invariant: in any T seconds an event has at most EVENT_BURST + T * EVENT_PER_S lines and
one count in WINDOW_S; memory does not grow with the number of peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

PEER_BURST: Final = 100
PEER_PER_S: Final = 0.5
EVENT_BURST: Final = 1000
EVENT_PER_S: Final = 5.0
WINDOW_S: Final = 10.0
MAX_PEERS: Final = 2000  # with an event each; the one heard of least recently is forgotten
MAX_COUNTED_PEERS: Final = 100

CHILD_BURST_BYTES: Final = 4 << 20
CHILD_BYTES_PER_S: Final = 128 << 10


class Bucket:
    """Holds up to `burst`, and gets `per_s` a second. Full at first."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._level = float(burst)
        self._at_s: float | None = None

    def level(self, now_s: float) -> float:
        if self._at_s is not None:
            gained = max(0.0, now_s - self._at_s) * self._per_s
            self._level = min(self._burst, self._level + gained)
        self._at_s = now_s
        return self._level

    def take(self, amount: float, now_s: float) -> bool:
        """Whether there was as much; if not, nothing is taken."""
        if self.level(now_s) < amount:
            return False
        self._level -= amount
        return True


@dataclass(slots=True)
class HeldBack:
    """Lines of one event that were not written."""

    event: str
    since_s: float
    lines: int = 0
    severity: int = 0  # the highest of them
    peers: set[str] = field(default_factory=set)  # at most MAX_COUNTED_PEERS


class LogRate:
    """Decides about each line of one process. Times may come from any clock that does not go back.

    Events are names that a program has written down, so that there are only so many.
    """

    def __init__(self) -> None:
        self._events: dict[str, Bucket] = {}
        self._peers: dict[tuple[str, str], Bucket] = {}  # the one heard of last at the end
        self._held_back: dict[str, HeldBack] = {}

    def allows(self, event: str, peer: str, severity: int, now_s: float) -> bool:
        """Whether to write a line. `peer` is empty for what no peer causes."""
        if (not peer or self._peer(event, peer).take(1, now_s)) and self._event(event).take(
            1, now_s
        ):
            return True
        held = self._held_back.setdefault(event, HeldBack(event, now_s))
        held.lines += 1
        held.severity = max(held.severity, severity)
        if peer and len(held.peers) < MAX_COUNTED_PEERS:
            held.peers.add(peer)
        return False

    def due_s(self) -> float | None:
        """When the next count is to be told; None if nothing was held back."""
        return min((one.since_s + WINDOW_S for one in self._held_back.values()), default=None)

    def due(self, now_s: float) -> list[HeldBack]:
        """Counts whose window has ended; they begin anew."""
        found = [one for one in self._held_back.values() if one.since_s + WINDOW_S <= now_s]
        for one in found:
            del self._held_back[one.event]
        return found

    def rest(self) -> list[HeldBack]:
        """All counts, at the end of the process."""
        found = list(self._held_back.values())
        self._held_back.clear()
        return found

    def _event(self, event: str) -> Bucket:
        return self._events.setdefault(event, Bucket(EVENT_BURST, EVENT_PER_S))

    def _peer(self, event: str, peer: str) -> Bucket:
        bucket = self._peers.pop((event, peer), None) or Bucket(PEER_BURST, PEER_PER_S)
        self._peers[event, peer] = bucket
        if len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return bucket


class ByteRate:
    """What one child writes. Once too much came, nothing passes until a quarter of the burst is
    there again, so that gaps are few and each can be told."""

    def __init__(self) -> None:
        self._bucket = Bucket(CHILD_BURST_BYTES, CHILD_BYTES_PER_S)
        self._is_shut = False

    def allows(self, size_bytes: int, now_s: float) -> bool:
        if self._is_shut and self._bucket.level(now_s) < CHILD_BURST_BYTES / 4:
            return False
        self._is_shut = not self._bucket.take(size_bytes, now_s)
        return not self._is_shut
