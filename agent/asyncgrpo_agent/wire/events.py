"""What a session tells its owner. Plain data: no event holds a reference to the session."""

from __future__ import annotations

from dataclasses import dataclass

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.wire.headers import Headers


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """We are the HTTP/2 server and a request began."""

    stream_id: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """We are the HTTP/2 client and the response's headers came."""

    stream_id: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Body bytes. `flow_bytes` (padding included) must be acknowledged exactly once."""

    stream_id: int
    data: bytes | memoryview
    flow_bytes: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The peer has sent all that it will send on this stream."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The stream is gone: the peer reset it, or it broke a rule that concerns only the stream."""

    stream_id: int
    code: int
    safe_to_retry: bool


@dataclass(frozen=True, slots=True)
class StreamWritable:
    """The stream's send buffer is at or below low water, after having reached high water."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """`can_open()` is true again."""


@dataclass(frozen=True, slots=True)
class PingAcked:
    rtt_s: float


@dataclass(frozen=True, slots=True)
class SessionReady:
    """The peer's first SETTINGS came."""


@dataclass(frozen=True, slots=True)
class SessionClosed:
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
