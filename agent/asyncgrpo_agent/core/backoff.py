"""How long to wait before the next attempt, so that a fleet does not return in one instant.

Full jitter: each wait is drawn evenly from zero up to a ceiling that doubles with every attempt,
up to a cap. The ceiling falls back only after a connection stayed up for a while, so that a peer
which accepts and then fails at once is not hammered. Invariant: a delay is in [0, cap_s].
"""

from __future__ import annotations

from random import Random


class Backoff:
    """The delays of one reconnecting loop."""

    def __init__(
        self, rng: Random, base_s: float = 1.0, cap_s: float = 30.0, healthy_s: float = 30.0
    ) -> None:
        self._rng = rng
        self._base_s = base_s
        self._cap_s = cap_s
        self._healthy_s = healthy_s
        self._ceiling_s = base_s
        self._connected_at: float | None = None

    def next_delay_s(self) -> float:
        """The wait before the next attempt; each call raises the ceiling of the one after."""
        delay_s = self._rng.uniform(0.0, min(self._ceiling_s, self._cap_s))
        self._ceiling_s = min(self._ceiling_s * 2, self._cap_s)
        return delay_s

    def connected(self, now: float) -> None:
        self._connected_at = now

    def lost(self, now: float) -> None:
        """The connection ended; forget earlier failures if it had proved healthy."""
        if self._connected_at is not None and now - self._connected_at >= self._healthy_s:
            self._ceiling_s = self._base_s
        self._connected_at = None
