"""When to PING, and when a peer counts as gone. Any byte that comes is a proof of life.

Three deadlines: the first SETTINGS, the end of a frame or header block that has begun, and one
byte of any kind after a PING went out. A PING goes out every `ping_s`, busy or idle, because its
answer is also the round-trip time that status shows.
"""

from __future__ import annotations

from math import inf

from asyncgrpo_agent.wire.limits import Limits


class Liveness:
    """The timers of one session. `overdue` and `next_deadline` read them, the rest sets them."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._ping_s = limits.ping_s
        self._ping_deadline_s = limits.ping_deadline_s
        self._settings_due: float | None = now + limits.settings_deadline_s
        self._frame_due: float | None = None
        self._next_ping = now + limits.ping_s
        self._ping_sent: float | None = None
        self._pings = 0
        self._heard = now

    def set_ping(self, ping_s: float, ping_deadline_s: float, now: float) -> None:
        self._ping_s = ping_s
        self._ping_deadline_s = ping_deadline_s
        if self._ping_sent is None:
            self._next_ping = min(self._next_ping, now + ping_s) if self._pings else now + ping_s

    def heard(self, now: float) -> None:
        """Bytes came."""
        self._heard = now

    def finished(self) -> None:
        """A frame or header block came to its end; whatever is unfinished began after it."""
        self._frame_due = None

    def unfinished(self, now: float, deadline_s: float) -> None:
        """One has begun and may take so long; infinite if none has, or it may take any time."""
        if deadline_s == inf:
            self._frame_due = None
        elif self._frame_due is None:
            self._frame_due = now + deadline_s

    def ready(self) -> None:
        self._settings_due = None

    def ping_due(self, now: float) -> bytes | None:
        """The payload of a PING to send now, once."""
        if self._settings_due is not None or self._ping_sent is not None or now < self._next_ping:
            return None
        self._pings += 1
        self._ping_sent = now
        self._next_ping = now + self._ping_s
        return self._payload()

    def acked(self, payload: bytes, now: float) -> float | None:
        """The round-trip time if this answers the PING that is out, else None."""
        if self._ping_sent is None or payload != self._payload():
            return None
        rtt_s = now - self._ping_sent
        self._ping_sent = None
        return rtt_s

    def overdue(self, now: float) -> str | None:
        """Why the peer counts as gone, or None."""
        if self._settings_due is not None and now >= self._settings_due:
            return "the peer sent no HTTP/2 SETTINGS in time"
        if self._frame_due is not None and now >= self._frame_due:
            return "the peer did not finish a frame or header block in time"
        silence_due = self._silence_due()
        if silence_due is not None and now >= silence_due:
            return f"the peer has been silent for {now - self._heard:.1f} s, also to a PING"
        return None

    def next_deadline(self) -> float:
        silence_due = self._silence_due()
        due = [self._next_ping if silence_due is None else silence_due]
        due += [t for t in (self._settings_due, self._frame_due) if t is not None]
        return min(due)

    def _silence_due(self) -> float | None:
        if self._ping_sent is None:
            return None
        return max(self._ping_sent, self._heard) + self._ping_deadline_s

    def _payload(self) -> bytes:
        return self._pings.to_bytes(8, "big")
