"""HTTP/2 frames and header blocks from raw numbers, so that they may be as wrong as a test likes,
and the output of a session as words.
"""

from __future__ import annotations

from collections.abc import Iterator

from h2.errors import ErrorCodes

from asyncgrpo_agent.wire.session import (
    DataReceived,
    Event,
    ResponseStarted,
    SessionClosed,
    StreamEnded,
    StreamOpened,
    StreamReset,
)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = 0, 1, 2, 3, 4, 5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20

_OTHERS = {HEADERS: "headers", SETTINGS: "settings", PING: "ping", WINDOW_UPDATE: "window"}

GET = b"\x82\x87\x84\x01\x09localhost"  # GET, https, /, :authority
OK = b"\x88"


def raw(kind: int, flags: int, stream_id: int, body: bytes = b"") -> bytes:
    head = len(body).to_bytes(3, "big") + bytes((kind, flags))
    return head + stream_id.to_bytes(4, "big") + body


def headers(stream_id: int, block: bytes = GET, *, end: bool = False) -> bytes:
    return raw(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block)


def data(stream_id: int, body: bytes = b"x", *, end: bool = False) -> bytes:
    return raw(DATA, END_STREAM if end else 0, stream_id, body)


def settings(*pairs: tuple[int, int]) -> bytes:
    body = b"".join(code.to_bytes(2, "big") + value.to_bytes(4, "big") for code, value in pairs)
    return raw(SETTINGS, 0, 0, body)


def reset(stream_id: int, code: int = 8) -> bytes:
    return raw(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def window(stream_id: int, increment: int) -> bytes:
    return raw(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def field(name: bytes, value: bytes) -> bytes:
    """A literal that is not indexed; both lengths below 127."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def split(wire: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The whole frames of some output: kind, flags, stream, body."""
    while len(wire) >= 9:
        end = 9 + int.from_bytes(wire[:3], "big")
        yield wire[3], wire[4], int.from_bytes(wire[5:9], "big"), wire[9:end]
        wire = wire[end:]


def words_of_events(events: list[Event]) -> Iterator[str]:
    for event in events:
        match event:
            case StreamOpened(stream_id=stream_id):
                yield f"opened {stream_id}"
            case ResponseStarted(stream_id=stream_id):
                yield f"answer {stream_id}"
            case DataReceived(stream_id=stream_id, data=body):
                yield f"data {stream_id} {len(body)}"
            case StreamEnded(stream_id=stream_id):
                yield f"ended {stream_id}"
            case StreamReset(stream_id=stream_id):
                yield f"gone {stream_id}"
            case SessionClosed():
                yield "closed"
            case _:
                pass


def words_of_output(wire: bytes) -> Iterator[str]:
    for kind, flags, stream_id, body in split(wire):
        if kind == GOAWAY:
            yield f"GOAWAY {ErrorCodes(int.from_bytes(body[4:8], 'big')).name}"
        elif kind == RST_STREAM:
            yield f"RST {stream_id} {ErrorCodes(int.from_bytes(body, 'big')).name}"
        elif kind == SETTINGS and flags & ACK:
            yield "settings ack"
        elif kind == PING and flags & ACK:
            yield f"pong {body.decode('ascii')}"
        elif kind == DATA:
            yield f"sent {stream_id} {len(body)}"
        else:
            yield _OTHERS[kind]
