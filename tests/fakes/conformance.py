"""Tables of raw frames and what comes of them: the substance of h2spec's cases, for either role.

An outcome is in words: events (`opened`, `answer`, `data`, `ended`, `gone`, `closed`) and frames
sent (`GOAWAY code`, `RST stream code`, `pong`, `settings ack`); nothing at all means that it was
ignored. Where h2spec allows several outcomes, ours is written down. Where ours is milder or
harsher than its first choice, the row's name says so.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.wire_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    GET,
    GOAWAY,
    HEADERS,
    OK,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    data,
    field,
    headers,
    raw,
    reset,
    settings,
    window,
)

PROTOCOL_ERROR = "closed, GOAWAY PROTOCOL_ERROR"
FRAME_SIZE_ERROR = "closed, GOAWAY FRAME_SIZE_ERROR"
FLOW_CONTROL_ERROR = "closed, GOAWAY FLOW_CONTROL_ERROR"
STREAM_CLOSED = "closed, GOAWAY STREAM_CLOSED"
COMPRESSION_ERROR = "closed, GOAWAY COMPRESSION_ERROR"
MALFORMED = "RST 1 PROTOCOL_ERROR"  # stream error: one bad message must not end the others' link
OVERFLOW = "RST 1 FLOW_CONTROL_ERROR"
LATE = "RST 1 STREAM_CLOSED"
GONE = f"gone 1, {MALFORMED}"
ENDED = "opened 1, ended 1"
BROKEN = f"opened 1, {PROTOCOL_ERROR}"
IGNORED = ""

LARGEST_WINDOW = (1 << 31) - 1
PONG = "pong 12345678"
ping = raw(PING, 0, 0, b"12345678")
open_block = raw(HEADERS, 0, 1, GET)  # without END_HEADERS
whole = headers(1, end=True)
RESERVED_BIT = 1 << 31


class Row(NamedTuple):
    section: str
    name: str
    wire: bytes
    outcome: str

    def __str__(self) -> str:
        return f"{self.section} {self.name}"


def field_row(section: str, name: str, *more: bytes, first: bytes = GET) -> Row:
    """A request that has one thing wrong with its headers."""
    return Row(section, name, headers(1, first + b"".join(more), end=True), MALFORMED)


TOO_LONG = AUTHENTICATED.max_frame_bytes + 1
# Answered, or refused, alike by a client and a server whose SETTINGS have been exchanged.
EITHER = [
    Row("4.1", "unknown frame", raw(0x16, 0, 0, b"????????"), IGNORED),
    Row("4.1", "undefined flags", raw(PING, 0x16, 0, b"12345678"), PONG),
    Row("4.1", "reserved bit of the stream number", raw(PING, 0, RESERVED_BIT, b"12345678"), PONG),
    Row("4.2", "DATA over the limit (at its header)", data(1, bytes(TOO_LONG)), FRAME_SIZE_ERROR),
    Row("4.2", "HEADERS over the limit", headers(1, bytes(TOO_LONG)), FRAME_SIZE_ERROR),
    Row("5.4.1", "bad PING", raw(PING, 0, 3, b"12345678"), PROTOCOL_ERROR),
    Row("5.5", "unknown frame on a stream", raw(0x16, 0, 1, b"????????"), IGNORED),
    Row("6.1", "DATA on stream 0", data(0), PROTOCOL_ERROR),
    Row("6.2", "HEADERS on stream 0", headers(0), PROTOCOL_ERROR),
    Row("6.3", "PRIORITY on stream 0", raw(PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    Row("6.3", "PRIORITY of 4 bytes", raw(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    Row("6.4", "RST_STREAM on stream 0", reset(0), PROTOCOL_ERROR),
    Row("6.4", "RST_STREAM of 3 bytes", raw(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    Row("6.5", "SETTINGS", settings((3, 100)), "settings ack"),
    Row(
        "6.5",
        "SETTINGS acknowledgement with a body",
        raw(SETTINGS, ACK, 0, bytes(6)),
        FRAME_SIZE_ERROR,
    ),
    Row("6.5", "SETTINGS on stream 1", raw(SETTINGS, 0, 1, bytes(6)), PROTOCOL_ERROR),
    Row("6.5", "SETTINGS of 3 bytes", raw(SETTINGS, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    Row("6.5.2", "push neither on nor off", settings((2, 2)), PROTOCOL_ERROR),
    Row("6.5.2", "initial window too large", settings((4, 1 << 31)), FLOW_CONTROL_ERROR),
    Row("6.5.2", "frame size below 16,384", settings((5, 16383)), PROTOCOL_ERROR),
    Row("6.5.2", "frame size above 16,777,215", settings((5, 1 << 24)), PROTOCOL_ERROR),
    Row("6.5.2", "unknown setting", settings((0xFF, 1)), "settings ack"),
    Row("6.5.3", "one setting twice", settings((4, 100), (4, 1)), "settings ack"),
    Row("6.5.3", "unasked acknowledgement", raw(SETTINGS, ACK, 0) * 3, IGNORED),
    Row("6.7", "PING", ping, PONG),
    Row("6.7", "PING answers", raw(PING, ACK, 0, b"invalid!"), IGNORED),
    Row("6.7", "PING of 6 bytes", raw(PING, 0, 0, b"123456"), FRAME_SIZE_ERROR),
    Row("6.7", "PING on stream 1", raw(PING, 0, 1, b"12345678"), PROTOCOL_ERROR),
    Row("6.8", "GOAWAY on stream 1", raw(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    Row("6.8", "GOAWAY of 4 bytes", raw(GOAWAY, 0, 0, bytes(4)), FRAME_SIZE_ERROR),
    Row("6.9", "WINDOW_UPDATE by 0", window(0, 0), PROTOCOL_ERROR),
    Row("6.9", "WINDOW_UPDATE of 3 bytes", raw(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    Row("6.9.1", "connection window too large", window(0, LARGEST_WINDOW), FLOW_CONTROL_ERROR),
    Row("6.10", "CONTINUATION on stream 0", raw(CONTINUATION, END_HEADERS, 0, GET), PROTOCOL_ERROR),
    Row("7", "GOAWAY with an unknown code", raw(GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff"), "closed"),
]

SERVER = [
    # Streams and their states.
    Row("5.1", "DATA on an idle stream", data(1), PROTOCOL_ERROR),
    Row("5.1", "RST_STREAM on an idle stream", reset(1), PROTOCOL_ERROR),
    Row("5.1", "WINDOW_UPDATE on an idle stream", window(1, 1), PROTOCOL_ERROR),
    Row("5.1", "CONTINUATION on an idle stream", raw(CONTINUATION, 4, 1, GET), PROTOCOL_ERROR),
    Row("5.1", "PRIORITY on an idle stream", raw(PRIORITY, 0, 3, bytes(5)), IGNORED),
    Row("5.1", "half-closed: DATA", whole + data(1), f"{ENDED}, gone 1, {LATE}"),
    Row("5.1", "half-closed: HEADERS", whole + headers(1, end=True), f"{ENDED}, gone 1, {LATE}"),
    Row(
        "5.1",
        "half-closed: CONTINUATION",
        whole + raw(CONTINUATION, 4, 1, GET),
        f"{ENDED}, {PROTOCOL_ERROR}",
    ),
    Row("5.1", "half-closed: WINDOW_UPDATE", whole + window(1, 1), "opened 1, ended 1"),
    Row("5.1", "half-closed: PRIORITY", whole + raw(PRIORITY, 0, 1, bytes(5)), "opened 1, ended 1"),
    Row(
        "5.1",
        "reset by the peer: DATA",
        headers(1) + reset(1) + data(1),
        f"opened 1, gone 1, {LATE}",
    ),
    Row(
        "5.1",
        "reset by the peer: HEADERS",
        headers(1) + reset(1) + whole,
        f"opened 1, gone 1, {LATE}",
    ),
    Row(
        "5.1",
        "reset by the peer: CONTINUATION",
        headers(1) + reset(1) + raw(9, 4, 1, GET),
        f"opened 1, gone 1, {LATE}",
    ),
    Row(
        "5.1",
        "reset by the peer: PRIORITY",
        headers(1) + reset(1) + raw(2, 0, 1, bytes(5)),
        "opened 1, gone 1",
    ),
    Row("5.1.1", "even stream number", headers(2, end=True), PROTOCOL_ERROR),
    Row("5.1.1", "smaller stream number", headers(5) + headers(3), f"opened 5, {PROTOCOL_ERROR}"),
    Row(
        "5.3.1",
        "HEADERS that depend on themselves",
        raw(1, 0x25, 1, b"\0\0\0\1\0" + GET),
        PROTOCOL_ERROR,
    ),
    Row("5.3.1", "PRIORITY on itself", raw(PRIORITY, 0, 1, b"\0\0\0\1\0"), PROTOCOL_ERROR),
    Row("5.5", "unknown frame in a header block", open_block + raw(0x16, 0, 0), PROTOCOL_ERROR),
    # Frames.
    Row(
        "4.2",
        "DATA of the largest size",
        headers(1) + data(1, bytes(65536)),
        "opened 1, data 1 65536",
    ),
    Row(
        "4.3",
        "header block that does not decode",
        headers(1, b"\x00\x85\xf2\xb2"),
        COMPRESSION_ERROR,
    ),
    Row("4.3", "PRIORITY in a header block", open_block + raw(2, 0, 1, bytes(5)), PROTOCOL_ERROR),
    Row(
        "4.3",
        "HEADERS of another stream in a header block",
        open_block + headers(3),
        PROTOCOL_ERROR,
    ),
    Row(
        "6.1",
        "DATA with its length and padding",
        headers(1) + raw(0, 8, 1, b"\x02xx\0\0"),
        "opened 1, data 1 2",
    ),
    Row("6.1", "DATA with too much padding", headers(1) + raw(DATA, PADDED, 1, b"\x16xx"), BROKEN),
    Row("6.2", "HEADERS with padding", raw(1, 0xD, 1, b"\x02" + GET + bytes(2)), ENDED),
    Row("6.2", "HEADERS with a priority", raw(1, 0x25, 1, bytes(5) + GET), ENDED),
    Row(
        "6.2", "HEADERS with too much padding", raw(HEADERS, 0xD, 1, b"\xff" + GET), PROTOCOL_ERROR
    ),
    Row("6.4", "unknown code of RST_STREAM", headers(1) + reset(1, 0xFF), "opened 1, gone 1"),
    Row(
        "6.9",
        "WINDOW_UPDATE by 0 on a stream (harsh: as a fault of the connection)",
        headers(1) + window(1, 0),
        BROKEN,
    ),
    Row(
        "6.9.1",
        "stream window too large",
        headers(1) + window(1, LARGEST_WINDOW),
        f"opened 1, gone 1, {OVERFLOW}",
    ),
    Row("6.10", "CONTINUATION twice", open_block + raw(9, 0, 1) + raw(9, 4, 1), "opened 1"),
    Row(
        "6.10",
        "CONTINUATION, then another frame",
        open_block + raw(9, 0, 1) + data(1),
        PROTOCOL_ERROR,
    ),
    Row("6.10", "CONTINUATION on stream 0", open_block + raw(9, 4, 0), PROTOCOL_ERROR),
    Row("6.10", "CONTINUATION of another stream", open_block + raw(9, 4, 3), PROTOCOL_ERROR),
    Row("6.10", "CONTINUATION after the block's end", headers(1) + raw(9, 4, 1, GET), BROKEN),
    Row("6.10", "CONTINUATION after CONTINUATION", open_block + raw(9, 4, 1) * 2, BROKEN),
    Row(
        "6.10",
        "CONTINUATION after DATA",
        headers(1) + data(1) + raw(9, 4, 1),
        f"opened 1, data 1 1, {PROTOCOL_ERROR}",
    ),
    Row(
        "8.2",
        "PUSH_PROMISE from a client",
        raw(PUSH_PROMISE, 4, 1, b"\0\0\0\2" + GET),
        PROTOCOL_ERROR,
    ),
    # Messages.
    Row("8.1", "GET", whole, "opened 1, ended 1"),
    Row("8.1", "POST", headers(1) + data(1, end=True), "opened 1, data 1 1, ended 1"),
    Row(
        "8.1",
        "POST with trailers",
        headers(1) + data(1) + headers(1, field(b"x", b"y"), end=True),
        "opened 1, data 1 1, ended 1",
    ),
    Row(
        "8.1.2.6",
        "content-length, one DATA and trailers",
        headers(1, GET + field(b"content-length", b"9")) + data(1) + headers(1, b"", end=True),
        f"opened 1, data 1 1, {GONE}",
    ),
    Row(
        "8.1",
        "HEADERS again without END_STREAM",
        headers(1) + headers(1, field(b"x", b"y")),
        f"opened 1, gone 1, {MALFORMED}",
    ),
    field_row("8.1.2", "upper case name", field(b"X-TEST", b"ok")),
    field_row("8.1.2.1", "unknown pseudo-header", field(b":test", b"ok")),
    field_row("8.1.2.1", "pseudo-header of an answer", field(b":status", b"200")),
    field_row("8.1.2.1", "pseudo-header after others", first=field(b"x", b"y") + GET),
    Row(
        "8.1.2.1",
        "pseudo-header in trailers",
        headers(1) + headers(1, field(b":method", b"GET"), end=True),
        f"opened 1, gone 1, {MALFORMED}",
    ),
    field_row("8.1.2.2", "connection", field(b"connection", b"keep-alive")),
    field_row("8.1.2.2", "transfer-encoding", field(b"transfer-encoding", b"chunked")),
    field_row("8.1.2.2", "te other than trailers", field(b"te", b"trailers, deflate")),
    field_row("8.1.2.3", "empty path", first=b"\x82\x87" + field(b":path", b"")),
    field_row("8.1.2.3", "no method", first=b"\x87\x84\x01\x01a"),
    field_row("8.1.2.3", "no scheme", first=b"\x82\x84\x01\x01a"),
    field_row("8.1.2.3", "no path", first=b"\x82\x87\x01\x01a"),
    field_row("8.1.2.3", "method twice", first=b"\x82" + GET),
    field_row("8.1.2.3", "scheme twice", first=b"\x87" + GET),
    field_row("8.1.2.3", "path twice", first=b"\x84" + GET),
    field_row("8.1.2", "CR and LF in a value", field(b"x", b"a\r\nb")),
    field_row("8.1.2", "NUL in a value", field(b"x", b"a\x00b")),
    field_row("8.1.2", "space around a value", field(b"x", b" a ")),
    field_row("8.1.2", "empty name", field(b"", b"a")),
    field_row("8.1.2.6", "content-length of a GET without body", field(b"content-length", b"1")),
    field_row("8.1.2.6", "content-length that is no number", field(b"content-length", b"1x")),
    Row(
        "8.1.2.6",
        "content-length and one DATA",
        headers(1, GET + field(b"content-length", b"1")) + data(1, b"test", end=True),
        f"opened 1, gone 1, {MALFORMED}",
    ),
    Row(
        "8.1.2.6",
        "content-length and several DATA",
        headers(1, GET + field(b"content-length", b"9")) + data(1) + data(1, end=True),
        f"opened 1, data 1 1, gone 1, {MALFORMED}",
    ),
    # HPACK.
    Row("hpack 2.3.3", "index beyond both tables", headers(1, GET + b"\xc6"), COMPRESSION_ERROR),
    Row(
        "hpack 2.3.3",
        "name index beyond both tables",
        headers(1, GET + b"\x7f\x00\x01x"),
        COMPRESSION_ERROR,
    ),
    Row("hpack 4.2", "table size update at the end", headers(1, GET + b"\x20"), COMPRESSION_ERROR),
    Row(
        "hpack 5.2",
        "padding of more than 7 bits",
        headers(1, GET + b"\x00\x01x\x82\x1f\xff"),
        COMPRESSION_ERROR,
    ),
    Row("hpack 5.2", "padding of zeros", headers(1, GET + b"\x00\x01x\x81\x18"), COMPRESSION_ERROR),
    Row(
        "hpack 5.2",
        "end of string",
        headers(1, GET + b"\x00\x01x\x84\xff\xff\xff\xff"),
        COMPRESSION_ERROR,
    ),
    Row("hpack 6.1", "index 0", headers(1, GET + b"\x80"), COMPRESSION_ERROR),
    Row(
        "hpack 6.3",
        "table larger than we allow",
        headers(1, b"\x3f\xe2\x1f" + GET),
        COMPRESSION_ERROR,
    ),
    Row(
        "hpack 6.3",
        "table once we allow none",
        raw(4, ACK, 0) + headers(1, b"\x21" + GET),
        COMPRESSION_ERROR,
    ),
    Row("hpack 6.3", "table of size 0", headers(1, b"\x20" + GET), "opened 1"),
    Row("hpack 6.3", "table of the default size", headers(1, b"\x3f\xe1\x1f" + GET), "opened 1"),
    Row(
        "hpack 7.1",
        "endless integer",
        headers(1, b"\xff" + b"\xff" * 40 + b"\x01"),
        COMPRESSION_ERROR,
    ),
]
REPRESENTATIONS = {
    "indexed": b"\x90",
    "literal, indexed": b"\x40\x01x\x01y",
    "literal, indexed, known name": b"\x53\x01y",
    "literal": b"\x00\x01x\x01y",
    "literal, known name": b"\x0f\x04\x01y",
    "literal, never indexed": b"\x10\x01x\x01y",
    "literal, never indexed, known name": b"\x1f\x04\x01y",
    "Huffman": b"\x00\x81\xf3\x81\xf5",
}
SERVER += [
    Row("hpack 6", name, headers(1, GET + representation), "opened 1")
    for name, representation in REPRESENTATIONS.items()
]

CLIENT = [  # a request is under way on stream 1
    Row("8.1", "answer", headers(1, OK) + data(1, end=True), "answer 1, data 1 1, ended 1"),
    Row(
        "8.1",
        "answer with trailers",
        headers(1, OK) + headers(1, field(b"x", b"y"), end=True),
        "answer 1, ended 1",
    ),
    Row(
        "8.1",
        "informational answer first",
        headers(1, field(b":status", b"103")) + headers(1, OK),
        "answer 1",
    ),
    Row(
        "8.1",
        "informational answer that ends",
        headers(1, field(b":status", b"103"), end=True),
        GONE,
    ),
    Row("8.1", "DATA before the answer", data(1), PROTOCOL_ERROR),
    Row("8.1", "answer again", headers(1, OK) + headers(1, OK), f"answer 1, {GONE}"),
    Row("8.1", "answer reset", headers(1, OK) + reset(1), "answer 1, gone 1"),
    Row("8.1", "refused", reset(1, 7), "gone 1"),
    Row("8.1.2", "upper case name", headers(1, OK + field(b"X", b"y")), GONE),
    Row("8.1.2.1", "no status", headers(1, field(b"x", b"y")), GONE),
    Row("8.1.2.1", "status twice", headers(1, OK + OK), GONE),
    Row("8.1.2.1", "pseudo-header of a request", headers(1, OK + b"\x82"), GONE),
    Row("8.1.2.1", "pseudo-header after others", headers(1, field(b"x", b"y") + OK), GONE),
    Row(
        "8.1.2.1",
        "pseudo-header in trailers",
        headers(1, OK) + headers(1, OK, end=True),
        f"answer 1, {GONE}",
    ),
    Row(
        "8.1.2.1",
        "status that is no number (left to the reader)",
        headers(1, field(b":status", b"abc")),
        "answer 1",
    ),
    Row("8.1.2.2", "connection", headers(1, OK + field(b"connection", b"close")), GONE),
    Row("8.1.2.2", "CR and LF in a value", headers(1, OK + field(b"x", b"a\r\nb")), GONE),
    Row(
        "8.1.2.6",
        "content-length too small",
        headers(1, OK + field(b"content-length", b"1")) + data(1, b"xx"),
        f"answer 1, {GONE}",
    ),
    Row(
        "8.1.2.6",
        "content-length too large",
        headers(1, OK + field(b"content-length", b"9")) + data(1, end=True),
        f"answer 1, {GONE}",
    ),
    Row("5.1", "HEADERS on an idle stream", headers(3, OK), PROTOCOL_ERROR),
    Row("5.1", "DATA on an idle stream", data(3), PROTOCOL_ERROR),
    Row("5.1", "RST_STREAM on an idle stream (mild: it changes nothing)", reset(3), IGNORED),
    Row("5.1", "WINDOW_UPDATE on an idle stream", window(3, 1), PROTOCOL_ERROR),
    Row(
        "5.1",
        "half-closed: DATA",
        headers(1, OK, end=True) + data(1),
        f"answer 1, ended 1, gone 1, {LATE}",
    ),
    Row(
        "5.1",
        "half-closed: HEADERS",
        headers(1, OK, end=True) + headers(1, OK),
        f"answer 1, ended 1, gone 1, {LATE}",
    ),
    Row(
        "5.1",
        "half-closed: WINDOW_UPDATE",
        headers(1, OK, end=True) + window(1, 1),
        "answer 1, ended 1",
    ),
    Row("5.1", "reset by the peer: DATA", reset(1) + data(1), f"gone 1, {LATE}"),
    Row("5.1", "reset by the peer: HEADERS", reset(1) + headers(1, OK), f"gone 1, {LATE}"),
    Row("5.1.1", "stream begun by a server", headers(2, GET), PROTOCOL_ERROR),
    Row("6.5.2", "push offered by a server", settings((2, 1)), PROTOCOL_ERROR),
    Row(
        "6.9",
        "WINDOW_UPDATE by 0 on a stream (harsh: as a fault of the connection)",
        window(1, 0),
        PROTOCOL_ERROR,
    ),
    Row("6.9.1", "stream window too large", window(1, LARGEST_WINDOW), f"gone 1, {OVERFLOW}"),
    Row("6.10", "answer in pieces", raw(HEADERS, 0, 1, OK) + raw(CONTINUATION, 4, 1), "answer 1"),
    Row("8.2", "PUSH_PROMISE", raw(PUSH_PROMISE, 4, 1, b"\0\0\0\2" + GET), PROTOCOL_ERROR),
    Row("hpack 6.1", "index 0", headers(1, OK + b"\x80"), COMPRESSION_ERROR),
    Row(
        "hpack 6.3",
        "table larger than we allow",
        headers(1, b"\x3f\xe2\x1f" + OK),
        COMPRESSION_ERROR,
    ),
]
