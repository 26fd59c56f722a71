"""What waits to be sent, by stream: bytes in order, water marks, and whose turn is next.

Producers are held back by the marks (they look at `writable`), streams take turns, and a stream
that has no window leaves the round until it is woken. Nothing here knows HTTP/2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class SendBuffer:
    """The bytes that one stream has yet to send, in order, and whether its end follows them."""

    __slots__ = ("_chunks", "_head", "choked", "ending", "in_round", "size_bytes")

    def __init__(self) -> None:
        self._chunks: deque[bytes | memoryview] = deque()
        self._head = 0  # bytes of the first chunk that are already gone
        self.size_bytes = 0
        self.ending = False
        self.choked = False  # reached high water and has not fallen to low water since
        self.in_round = False

    def push(self, data: bytes | memoryview) -> None:
        if data:
            self._chunks.append(data)
            self.size_bytes += len(data)

    def pull(self, most_bytes: int) -> bytes | memoryview:
        """Remove and return the first bytes, at most `most_bytes`."""
        left = min(most_bytes, self.size_bytes)
        self.size_bytes -= left
        parts: list[bytes | memoryview] = []
        while left > 0:
            chunk = self._chunks[0]
            end = self._head + left
            if end < len(chunk):
                parts.append(chunk[self._head : end])
                self._head = end
                break
            parts.append(chunk[self._head :] if self._head else chunk)
            left -= len(chunk) - self._head
            self._chunks.popleft()
            self._head = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Outbox:
    """The send buffers of all open streams, served in turn."""

    def __init__(self, *, high_bytes: int, low_bytes: int) -> None:
        self.high_bytes = high_bytes
        self.low_bytes = low_bytes
        self._buffers: dict[int, SendBuffer] = {}
        self._round: deque[int] = deque()

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._buffers

    def __iter__(self) -> Iterator[int]:
        return iter(self._buffers)

    def get(self, stream_id: int) -> SendBuffer | None:
        return self._buffers.get(stream_id)

    def add(self, stream_id: int) -> None:
        self._buffers[stream_id] = SendBuffer()

    def drop(self, stream_id: int) -> None:
        """Forget the stream; its place in the round is skipped when its turn comes."""
        self._buffers.pop(stream_id, None)

    def clear(self) -> None:
        self._buffers.clear()
        self._round.clear()

    def push(self, stream_id: int, data: bytes | memoryview) -> None:
        buffer = self._buffers.get(stream_id)
        if buffer is not None:
            buffer.push(data)
            buffer.choked = buffer.choked or buffer.size_bytes >= self.high_bytes
            self.wake(stream_id)

    def wake(self, stream_id: int) -> None:
        """Give the stream a place in the round if it has something to send and has none."""
        buffer = self._buffers.get(stream_id)
        if buffer is not None and buffer.size_bytes and not buffer.in_round:
            buffer.in_round = True
            self._round.append(stream_id)

    def wake_all(self) -> None:
        for stream_id in self._buffers:
            self.wake(stream_id)

    def writable(self, stream_id: int) -> bool:
        buffer = self._buffers.get(stream_id)
        return buffer is None or buffer.size_bytes < self.high_bytes

    @property
    def waiting(self) -> int:
        """An upper bound of the streams in the round."""
        return len(self._round)

    def next_turn(self) -> tuple[int, SendBuffer] | None:
        """Take the next stream out of the round; the caller wakes it again if it has more."""
        while self._round:
            stream_id = self._round.popleft()
            buffer = self._buffers.get(stream_id)
            if buffer is not None:
                buffer.in_round = False
                return stream_id, buffer
        return None

    def relieved(self, buffer: SendBuffer) -> bool:
        """True once after the buffer has fallen from high water to low water."""
        if buffer.choked and buffer.size_bytes <= self.low_bytes:
            buffer.choked = False
            return True
        return False
