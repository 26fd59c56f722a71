"""What a session tells its owner. Plain data: no event holds a reference to the session."""

from __future__ import annotations

import msgspec

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.wire.headers import Headers


class StreamOpened(msgspec.Struct, frozen=True):
    """We are the HTTP/2 server and a request began."""

    stream_id: int
    headers: Headers


class ResponseStarted(msgspec.Struct, frozen=True):
    """We are the HTTP/2 client and the response's headers came."""

    stream_id: int
    headers: Headers


class DataReceived(msgspec.Struct, frozen=True):
    """Body bytes. `flow_bytes` (padding included) must be acknowledged exactly once."""

    stream_id: int
    data: bytes | memoryview
    flow_bytes: int


class StreamEnded(msgspec.Struct, frozen=True):
    """The peer has sent all that it will send on this stream."""

    stream_id: int


class StreamReset(msgspec.Struct, frozen=True):
    """The stream is gone: the peer reset it, or it broke a rule that concerns only the stream."""

    stream_id: int
    code: int
    safe_to_retry: bool


class StreamWritable(msgspec.Struct, frozen=True):
    """The stream's send buffer is at or below low water, after having reached high water."""

    stream_id: int


class SlotsFreed(msgspec.Struct, frozen=True):
    """`can_open()` is true again."""


class PingAcked(msgspec.Struct, frozen=True):
    rtt_s: float


class SessionReady(msgspec.Struct, frozen=True):
    """The peer's first SETTINGS came."""


class SessionClosed(msgspec.Struct, frozen=True):
    """The last event of every session. `error` is None if somebody closed it on purpose."""

    error: LinkError | None
    reason: str


Event = (
    StreamOpened
    | ResponseStarted
    | DataReceived
    | StreamEnded
    | StreamReset
    | StreamWritable
    | SlotsFreed
    | PingAcked
    | SessionReady
    | SessionClosed
)
