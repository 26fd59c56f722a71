"""Cuts the byte stream into frames and judges each by its 9-byte header, before its body is kept.

h2 looks at a frame's length only when the whole frame is there (up to 16 MiB) and counts header
blocks in frames, not bytes. Here a frame that is too long, a header block that is too large or a
wrong preface is refused as soon as its first bytes show it, whatever the chunking. At most one
allowed frame and the chunk being fed are held.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = Struct(">HBBBL")  # length in the first two, kind, flags, stream
HEAD_BYTES: Final = _HEAD.size
_ACK: Final = 0x1
_MAX_SETTINGS_BYTES: Final = 32 * 6  # HTTP/2 and its extensions define about ten settings
_VIEW_BYTES: Final = 64 << 10  # a body from here on is worth not copying
_KEPT_PER_BODY: Final = 3  # a view may keep a buffer alive that is so many times as large

PROTOCOL_ERROR: Final = 0x1
FRAME_SIZE_ERROR: Final = 0x6
ENHANCE_YOUR_CALM: Final = 0xB


DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8

_BLOCK_KINDS: Final = frozenset((HEADERS, PUSH_PROMISE, CONTINUATION))


class Breach(Exception):
    """The peer broke a rule of the whole connection: the HTTP/2 error code and the reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def head_of(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """The nine bytes ahead of a body of `length`."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


class Frame(NamedTuple):
    """One whole frame; `length` is that of its body. Only a large DATA body is a memoryview."""

    kind: int
    flags: int
    stream_id: int
    length: int
    body: bytes | memoryview

    @property
    def raw(self) -> bytes:
        """The frame as it is on the wire."""
        return head_of(self.kind, self.flags, self.stream_id, self.length) + self.body


class FrameSplitter:
    """Bytes in, whole frames out. Raises Breach, after which it must not be used again."""

    def __init__(self, *, preface: bool, max_frame_bytes: int, max_header_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.max_header_bytes = max_header_bytes
        self.block_open = False  # a header block has begun and not ended
        self._preface = PREFACE if preface else b""
        self._first = True
        self._block_bytes = 0
        self._buffer: bytes | bytearray | memoryview = b""
        self._at = 0  # where in it the next frame begins
        self._begun: bytearray | None = None  # the buffer, if it is ours and may grow
        self._rest: bytes | memoryview = b""  # what follows a buffer that ends with its frame

    def feed(self, data: bytes | bytearray) -> None:
        """Take bytes over: a bytearray must not be changed any more."""
        if not self._buffer:
            self._buffer, self._at = data, 0
            return
        if self._begun is None or self._rest:  # else nobody has a view of it
            self._begun = bytearray(memoryview(self._buffer)[self._at :])
            self._begun += self._rest
            self._buffer, self._at, self._rest = self._begun, 0, b""
        missing = self._missing_bytes(len(data))
        whole = memoryview(data)
        self._begun += whole[:missing]
        self._rest = whole[missing:]

    def _missing_bytes(self, most_bytes: int) -> int:
        """How much completes the frame that has begun: the rest need not be copied."""
        held = len(self._buffer)
        if held < HEAD_BYTES:
            return most_bytes
        high, low, *_ = _HEAD.unpack_from(self._buffer)
        missing = HEAD_BYTES + (high << 8 | low) - held
        return missing if 0 < missing < most_bytes else most_bytes

    @property
    def held_bytes(self) -> int:
        return len(self._buffer) - self._at + len(self._rest)

    @property
    def begun(self) -> int | None:
        """The kind of the frame whose first bytes are here, once `next_frame` gives no more.

        None if nothing is here, and -1 while the kind is not.
        """
        if not self._buffer:
            return None
        return self._buffer[self._at + 3] if self.held_bytes > 3 else -1

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes are fed."""
        if self._preface and not self._take_preface():
            return None
        buffer, begin = self._buffer, self._at + HEAD_BYTES
        if len(buffer) < begin:
            return None
        high, low, kind, flags, stream_id = _HEAD.unpack_from(buffer, self._at)
        length = high << 8 | low
        self._judge(kind, flags, length)
        end = begin + length
        if len(buffer) < end:
            return None
        body: bytes | memoryview = memoryview(buffer)[begin:end]
        if kind != DATA or length < _VIEW_BYTES or length * _KEPT_PER_BODY < len(buffer):
            body = bytes(body)
        self._skip_to(end)
        if kind != DATA:
            self._note(kind, flags, length)
        return Frame(kind, flags, stream_id & 0x7FFF_FFFF, length, body)

    def _skip_to(self, end: int) -> None:
        self._at = end
        self._begun = None
        if end == len(self._buffer):
            self._buffer, self._at, self._rest = self._rest, 0, b""

    def _take_preface(self) -> bool:
        """Compare what is there of the client's preface; True once it is complete."""
        have = bytes(self._buffer[: len(self._preface)])
        if not self._preface.startswith(have):
            raise Breach(PROTOCOL_ERROR, "the peer does not speak HTTP/2")
        if len(have) < len(self._preface):
            return False
        self._skip_to(len(self._preface))
        self._preface = b""
        return True

    def _judge(self, kind: int, flags: int, length: int) -> None:
        """Everything that the header alone can be refused for; no state is changed."""
        if length > self.max_frame_bytes:
            raise Breach(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if self._first and (kind != SETTINGS or flags & _ACK):
            raise Breach(PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self.block_open and kind != CONTINUATION:
            raise Breach(PROTOCOL_ERROR, "a frame inside a header block")
        if kind in _BLOCK_KINDS:
            if self._block_bytes + length > self.max_header_bytes:
                raise Breach(ENHANCE_YOUR_CALM, "a header block that is too large")
        elif kind == SETTINGS and length:
            if flags & _ACK:
                raise Breach(FRAME_SIZE_ERROR, "a SETTINGS acknowledgement with a body")
            if length > _MAX_SETTINGS_BYTES:
                raise Breach(ENHANCE_YOUR_CALM, f"a SETTINGS frame of {length} bytes")

    def _note(self, kind: int, flags: int, length: int) -> None:
        self._first = False
        if kind in _BLOCK_KINDS:
            self.block_open = not flags & END_HEADERS
            self._block_bytes = self._block_bytes + length if self.block_open else 0
