"""Rate limits on what a peer can make us do for nothing. h2 has none.

Three token buckets, each charged before h2 spends time on a frame. A breach ends the connection;
it never ends because of volume alone: streams that end in order give their token back, and body
bytes in either direction earn tokens for the small frames that go with them.
"""

from __future__ import annotations

from typing import Final

from asyncgrpo_agent.wire.frames import (
    DATA,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    Breach,
    Frame,
)
from asyncgrpo_agent.wire.limits import Limits, Rate

_BYTES_PER_IDLE_FRAME: Final = 64  # a DATA frame with less than this costs more than it brings
_IDLE_FRAMES_PER_STREAM: Final = 8  # headers, window updates and an end belong to every stream


class TokenBucket:
    """`level` tokens, never above the burst; time is only read from the caller."""

    __slots__ = ("_now", "_rate", "level")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._now = now
        self.level = rate.burst

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take tokens, or say no and take none."""
        if now > self._now:
            self.give((now - self._now) * self._rate.per_s)
            self._now = now
        if self.level < tokens:
            return False
        self.level -= tokens
        return True

    def give(self, tokens: float) -> None:
        self.level = min(self._rate.burst, self.level + tokens)

    def set_rate(self, rate: Rate) -> None:
        """Another rate from here on; a larger burst is granted at once."""
        self.level = min(rate.burst, self.level + max(0.0, rate.burst - self._rate.burst))
        self._rate = rate


class Budgets:
    """The three buckets of one session. `charge_*` raise Breach when a bucket is empty."""

    def __init__(self, limits: Limits, *, client: bool, now: float) -> None:
        self._client = client
        self._streams = TokenBucket(limits.wasted_streams, now)
        self._control = TokenBucket(limits.control_frames, now)
        self._idle = TokenBucket(limits.idle_frames, now)

    def set_limits(self, limits: Limits) -> None:
        self._streams.set_rate(limits.wasted_streams)
        self._control.set_rate(limits.control_frames)
        self._idle.set_rate(limits.idle_frames)

    def charge_frame(self, frame: Frame, now: float, *, known: bool) -> None:
        """Pay for one inbound frame; `known` says whether its stream is open here."""
        kind = frame.kind
        if kind == DATA:
            self._idle.give(frame.length / _BYTES_PER_IDLE_FRAME)
            if frame.length < _BYTES_PER_IDLE_FRAME and not frame.flags & END_STREAM:
                self._charge(self._idle, now, "frames without progress")
        elif kind == HEADERS and not self._client:
            if not known:  # a new stream, or one that is gone
                self._charge(self._streams, now, "streams begun and not ended in order")
        elif kind == RST_STREAM and known:
            if self._client:  # a server paid when the stream was opened
                self._charge(self._streams, now, "streams reset")
        elif kind in (PING, SETTINGS):
            self._charge(self._control, now, "PING and SETTINGS frames")
        else:
            self._charge(self._idle, now, "frames without progress")

    def stream_ended(self) -> None:
        """A stream ended in order: both sides said all they had to say."""
        self._idle.give(_IDLE_FRAMES_PER_STREAM)
        if not self._client:
            self._streams.give(1.0)

    def stream_abandoned(self) -> None:
        """We gave a stream up for reasons of our own; the peer is not to blame."""
        if not self._client:
            self._streams.give(1.0)

    def sent(self, size_bytes: int) -> None:
        """Body bytes went out, and window updates will come back for them."""
        self._idle.give(size_bytes / _BYTES_PER_IDLE_FRAME)

    def _charge(self, bucket: TokenBucket, now: float, what: str) -> None:
        if not bucket.take(now):
            raise Breach(ENHANCE_YOUR_CALM, f"too many {what}")
