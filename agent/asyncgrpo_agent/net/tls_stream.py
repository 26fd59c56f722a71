"""A TLS stream that moves many records at a time.

Links carry bodies of megabytes, and what costs there is the work around a record: a read of the
socket and a turn of the loop for each 16 KiB. Here one read of the transport takes whatever has
come, up to eight records, and one `receive_some` hands out as many of them as its caller allows;
one `send_all` encrypts its whole buffer and sends it in one piece.

Invariants:
* One task receives and one sends; only the sender ever writes to the transport. What OpenSSL has
  to say because of something it read (the answer to a KeyUpdate) leaves ahead of the next data,
  which is all that TLS asks for. So receiving never waits for the peer to read, and cancelling it
  loses nothing.
* The transport is read only when everything that came before is decrypted and handed out, so a
  peer makes this side hold one read and one record at most, and few answers.
* Records cost time even if they carry nothing (a KeyUpdate 10 microseconds); a peer that sends
  hardly anything else is cut off.
* The end of the transport is the end of the stream, with or without close_notify: HTTP/2 has its
  own goodbye. `aclose` sends none either.

A cancelled `send_all` has sent an unknown part of a record and breaks the stream.
"""

from __future__ import annotations

import operator
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, cast

import trio

_RECORD_BYTES: Final = 16 << 10  # the most that one record carries
_RECORD_EXTRA_BYTES: Final = 22  # its head, type and tag
READ_BYTES: Final = 16 * (_RECORD_BYTES + _RECORD_EXTRA_BYTES)  # off the transport at a time
MAX_WASTE_BYTES: Final = 32 << 10  # of records with nothing in them: 1,200 KeyUpdates, 12 ms
_RECORD_BYTES_EXCUSED: Final = 32  # by each byte of plaintext
MAX_ANSWER_BYTES: Final = 4 << 10  # about 150 KeyUpdates answered and none of our data in between


class TlsStream(trio.abc.Stream):
    """TLS over `transport`, which it owns. `do_handshake` comes before everything else."""

    def __init__(
        self,
        transport: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        self._transport = transport
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.ssl_object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._receiving = _OneTask("receives from")
        self._sending = _OneTask("sends to")
        self._ended = False  # nothing comes any more
        self._closed = False
        self._broken = False
        self._reason = "this TLS stream is broken"
        self._fault: ssl.SSLError | None = None  # why it is broken, if TLS itself is the reason
        self._waste_bytes = 0

    def selected_alpn_protocol(self) -> str | None:
        """What both sides agreed on in the handshake."""
        return self.ssl_object.selected_alpn_protocol()

    async def do_handshake(self) -> None:
        """Once, before anything else. Raises BrokenResourceError because of an SSLError."""
        with self._receiving, self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check()
            try:
                while not self._shake():
                    await self._flush()
                    await self._fill()
            except ssl.SSLError as error:
                with suppress(trio.BrokenResourceError):
                    await self._flush()  # an alert: the peer is told why
                self._break(error)
                self._check()
            await self._flush()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Plaintext of all records that are there, up to `max_bytes`; b"" at the end."""
        most_bytes = READ_BYTES if max_bytes is None else operator.index(max_bytes)
        if most_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        with self._receiving:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check()
            data = self._decrypt(most_bytes)
            if data or self._ended:
                await trio.lowlevel.cancel_shielded_checkpoint()
            while not (data or self._ended):
                await self._fill()
                data = self._decrypt(most_bytes)
            return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt all of it, then send it in one piece."""
        await self.send_parts([data])

    async def send_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """`send_all` for what is in pieces, in as many records as if they were joined."""
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check()
            for records in whole_records(parts):
                try:
                    self.ssl_object.write(records)
                except ssl.SSLError as error:
                    self._break(error)
                    self._check()
            await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            self._check()
            await self._transport.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        self._closed = True
        await self._transport.aclose()

    # --- within ----------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Go on with the handshake as far as what has come allows; True once it is complete."""
        try:
            self.ssl_object.do_handshake()
        except ssl.SSLWantReadError:
            if not self._ended:
                return False
            self._broken = True
            self._check()
        return True

    async def _fill(self) -> None:
        data = await self._transport.receive_some(READ_BYTES)
        if data:
            self._incoming.write(data)
        else:
            self._ended = True

    def _decrypt(self, most_bytes: int) -> bytearray:
        """What whole records hold, empty if there is none. A fault comes after what preceded it."""
        pending_bytes = self._incoming.pending
        held_bytes = pending_bytes + self.ssl_object.pending()
        if not held_bytes:
            return bytearray()
        # The first record may have begun in an earlier read.
        data = bytearray(min(most_bytes, held_bytes + _RECORD_BYTES))
        size_bytes = self._decrypt_into(memoryview(data))
        self._judge(pending_bytes - self._incoming.pending, size_bytes)
        if not size_bytes:
            self._check()
        del data[size_bytes:]
        return data

    def _judge(self, record_bytes: int, plain_bytes: int) -> None:
        """Break the stream if the peer makes this side work for nothing."""
        waste_bytes = self._waste_bytes + record_bytes - _RECORD_BYTES_EXCUSED * plain_bytes
        self._waste_bytes = max(0, waste_bytes)
        if self._waste_bytes > MAX_WASTE_BYTES or self._outgoing.pending > MAX_ANSWER_BYTES:
            self._broken, self._reason = True, "the peer sends TLS records and hardly any data"

    def _decrypt_into(self, room: memoryview) -> int:
        size_bytes, most_bytes = 0, len(room)
        read = cast("Callable[[int, memoryview], int]", self.ssl_object.read)  # into a buffer
        try:
            while size_bytes < most_bytes:
                with room[size_bytes:] as rest:  # released even if an exception keeps it alive
                    part_bytes = read(most_bytes, rest)
                if not part_bytes:
                    self._ended = True
                    break
                size_bytes += part_bytes
                if not self._incoming.pending:
                    break  # the next read would say so with an exception, which costs more
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._break(error)
        room.release()
        return size_bytes

    async def _flush(self) -> None:
        """Send what is encrypted."""
        if not self._outgoing.pending:
            await trio.lowlevel.checkpoint()
            return
        try:
            await self._transport.send_all(self._outgoing.read())
        except BaseException:
            self._broken = True
            raise

    def _break(self, fault: ssl.SSLError) -> None:
        self._broken = True
        self._fault = fault

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this TLS stream was closed here")
        if self._broken:
            raise trio.BrokenResourceError(self._reason) from self._fault


async def send_parts(
    stream: trio.abc.Stream, parts: Sequence[bytes | bytearray | memoryview]
) -> None:
    """Send all of them in one piece; over TLS without joining them first."""
    if isinstance(stream, TlsStream):
        await stream.send_parts(parts)
    else:
        await stream.send_all(b"".join(parts))


def whole_records(
    parts: Iterable[bytes | bytearray | memoryview],
) -> Iterator[bytes | bytearray | memoryview]:
    """The same bytes cut where records end, so that each is full but the last.

    Large parts are copied only as far as they fill up a record that another has begun.
    """
    begun: bytes | bytearray | memoryview = b""
    for part in parts:
        if begun:
            room = _RECORD_BYTES - len(begun)
            begun = b"".join((begun, memoryview(part)[:room]))
            if len(begun) < _RECORD_BYTES:
                continue
            yield begun
            part = memoryview(part)[room:]
        whole = len(part) - len(part) % _RECORD_BYTES
        if whole:
            yield memoryview(part)[:whole]
        begun = memoryview(part)[whole:]
    if begun:
        yield begun


class _OneTask:
    """Refuses a second task that would do the same at the same time."""

    __slots__ = ("_busy", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task {self._what} this TLS stream")
        self._busy = True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._busy = False
