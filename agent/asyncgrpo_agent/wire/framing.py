"""Length-prefixed JSON: 4 bytes of big-endian length, then one message.

Used on control streams and for the envelopes ahead of rollout bodies. Bounded: a length above
the limit is the peer's fault, found before a byte of it is buffered.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from asyncgrpo_agent.errors import PeerProtocolError

MAX_MESSAGE_BYTES: Final = 1 << 20
_PREFIX_BYTES: Final = 4

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One framed message. Raises ValueError if it is larger than a peer would take."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(body)} bytes is over the limit")
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


def first_message(
    data: bytes | memoryview, decoder: msgspec.json.Decoder[T], max_bytes: int
) -> tuple[T, bytes] | None:
    """The message that `data` begins with, and what follows it; None unless it is whole.

    Raises PeerProtocolError for a bad or oversized one.
    """
    end = _end_of_message(data, max_bytes)
    if end is None:
        return None
    whole = memoryview(data)
    return _decoded(whole[_PREFIX_BYTES:end], decoder), bytes(whole[end:])


class Deframer(Generic[T]):
    """Collects bytes and gives whole messages, in order."""

    def __init__(self, decoder: msgspec.json.Decoder[T]) -> None:
        self.max_bytes = MAX_MESSAGE_BYTES  # of one message; may be set
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def next_message(self) -> T | None:
        """The next whole message, or None. Raises PeerProtocolError for a bad or oversized one."""
        end = _end_of_message(self._buffer, self.max_bytes)
        if end is None:
            return None
        body = bytes(self._buffer[_PREFIX_BYTES:end])
        del self._buffer[:end]
        return _decoded(body, self._decoder)

    def take_rest(self) -> bytes:
        """What follows the messages taken so far (the body behind an envelope)."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _end_of_message(data: bytes | bytearray | memoryview, max_bytes: int) -> int | None:
    """Where the message that `data` begins with ends, if all of it is there."""
    if len(data) < _PREFIX_BYTES:
        return None
    length = int.from_bytes(data[:_PREFIX_BYTES], "big")
    if length > max_bytes:
        raise PeerProtocolError(f"message of {length} bytes, at most {max_bytes} allowed")
    end = _PREFIX_BYTES + length
    return end if len(data) >= end else None


def _decoded(body: bytes | memoryview, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested without end
        raise PeerProtocolError(f"message that does not parse: {error}") from error
