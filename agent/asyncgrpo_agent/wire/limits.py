"""What one session allows its peer, and how much it holds for it. Plain constants, no logic.

Rates are token buckets: `burst` at once, refilled at `per_s`. They bound waste, not work: a stream
that ends in order gives its token back and body bytes earn more, so that ordinary traffic of any
volume and speed stays within them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    per_s: float
    burst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_frame_bytes: int = 16 * KIB
    """Largest inbound frame; HTTP/2 does not allow to advertise less."""

    max_streams: int = 1
    """Streams that the peer may have open at once; more are refused one by one."""

    stream_window_bytes: int = 64 * KIB
    """What the peer may send on one stream before its consumer has taken it."""

    connection_window_bytes: int = 8 * MIB
    """The same for all streams together."""

    max_header_bytes: int = 16 * KIB
    """Largest header block, both as it is sent and as it is decoded."""

    max_header_fields: int = 64
    """Fields in one header block; decoding costs 10 microseconds for each."""

    wasted_streams: Rate = Rate(per_s=10, burst=50)
    """Streams that were opened and did not end in order: reset by the peer, refused, malformed."""

    control_frames: Rate = Rate(per_s=5, burst=50)
    """PING and SETTINGS, each of which makes us answer."""

    idle_frames: Rate = Rate(per_s=50, burst=200)
    """Frames without progress: tiny DATA, WINDOW_UPDATE, PRIORITY, unknown and late ones."""

    max_control_bytes: int = 32 * KIB
    """Answers, header blocks and resets that wait because the peer does not read."""

    send_high_bytes: int = 256 * KIB
    """A stream whose send buffer holds this much is not writable."""

    send_low_bytes: int = 64 * KIB
    """StreamWritable comes when it has fallen to this."""

    settings_deadline_s: float = 5.0
    """Preface and first SETTINGS must be here by then."""

    header_block_deadline_s: float = 10.0
    """A header block, and a frame of any kind but DATA, must be complete this long after its first
    byte."""

    data_frame_deadline_s: float = 10.0
    """A DATA frame must be complete this long after its first byte."""

    ping_s: float = 10.0
    """Time between our PINGs, unless `set_ping` says otherwise."""

    ping_deadline_s: float = 10.0
    """A PING is out and not one byte has come for this long: the peer is gone."""


PRE_AUTH: Final = Limits()
"""Before the peer has proved who it is, and for anybody who never will (browsers, curl)."""

AUTHENTICATED: Final = replace(
    PRE_AUTH,
    stream_window_bytes=MIB,
    max_frame_bytes=128 * KIB,
    max_streams=4096,
    wasted_streams=Rate(per_s=256, burst=4096 + 2048),  # open ones count until they end in order
    control_frames=Rate(per_s=10, burst=100),
    idle_frames=Rate(per_s=500, burst=4096),
    max_control_bytes=256 * KIB,
    data_frame_deadline_s=inf,  # lines may be slow; streams and PINGs have deadlines of their own
)
"""After a registration was accepted."""
