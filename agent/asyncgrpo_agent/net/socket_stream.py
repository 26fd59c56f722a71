"""A connected socket as a stream, by the shortest way.

trio's own stream makes a turn of the loop for every call and looks for faults in several layers:
half of what a small request costs a server. Here a call that the kernel can serve at once is served
at once, and only one that must wait gives the loop to others. Reading, which a peer can keep up for
ever, gives way after a few pieces in a row, and does not try again at once where a piece was short:
there is hardly ever more. Writing ends with what there is to write.

Much is read into memory that is kept: to have a quarter of a megabyte from the system and give it
back costs 23 microseconds, five times as much as to read a small request.

One task reads and one writes, as with trio's. It owns the trio stream that it was made of.
"""

from __future__ import annotations

import os
import select
from typing import Final

import trio

_READ_BYTES: Final = 64 << 10
_READS_IN_A_ROW: Final = 4
_CHEAP_BYTES: Final = 64 << 10  # that os.read may ask for: memory which is at hand
_SPARE_BYTES: Final = 264 << 10  # what TLS asks for, and a little more
_spare: Final[list[bytearray]] = []  # taken out for one read: two threads never share one


class DirectStream(trio.abc.HalfCloseableStream):
    """`stream`, read and written past it. Errors are those of trio's streams."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._fd = stream.socket.fileno()
        self._closed = False
        self._in_a_row = 0
        self._drained = True

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come, b"" at the end."""
        await trio.lowlevel.checkpoint_if_cancelled()
        size_bytes = _READ_BYTES if max_bytes is None else max_bytes
        if size_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        self._check()
        if self._drained:
            await trio.lowlevel.wait_readable(self._fd)
        elif self._in_a_row >= _READS_IN_A_ROW:
            self._in_a_row = 0
            await trio.lowlevel.checkpoint()
        while True:
            self._check()
            try:
                data = _read(self._fd, size_bytes)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._fd)
            except OSError as error:
                raise trio.BrokenResourceError(f"socket connection broken: {error}") from error
            else:
                self._drained = len(data) < size_bytes
                self._in_a_row = 0 if self._drained else self._in_a_row + 1
                return data

    def has_input(self) -> bool:
        """Whether something has come that was not read yet; the end counts."""
        self._check()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """All of it. One that is cancelled has sent an unknown part."""
        await trio.lowlevel.checkpoint_if_cancelled()
        sent_bytes = self._write(data)
        if sent_bytes < len(data):
            with memoryview(data) as whole:
                while sent_bytes < len(whole):
                    await trio.lowlevel.wait_writable(self._fd)
                    with whole[sent_bytes:] as rest:
                        sent_bytes += self._write(rest)

    async def wait_send_all_might_not_block(self) -> None:
        self._check()
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._closed = True  # the number may soon be another file's
        await self._stream.aclose()

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        self._check()
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"socket connection broken: {error}") from error

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this socket was closed here")


def _read(fd: int, size_bytes: int) -> bytes:
    if not _CHEAP_BYTES < size_bytes <= _SPARE_BYTES:
        return os.read(fd, size_bytes)
    room = _spare.pop() if _spare else bytearray(_SPARE_BYTES)
    try:
        with memoryview(room) as whole, whole[:size_bytes] as asked:
            came_bytes = os.readv(fd, [asked])
            return bytes(asked[:came_bytes])
    finally:
        _spare.append(room)
