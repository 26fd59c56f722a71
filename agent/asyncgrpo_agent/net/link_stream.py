"""One HTTP/2 stream of a link, as tasks see it.

Reading acknowledges: what nobody takes stays unacknowledged and stops the peer, what is dropped
with its stream is acknowledged at once. Writing waits at the session's high-water mark. The
synchronous `on_*` methods are the link's and never block; whoever waits is woken by them and looks
again. Invariant: after a reset, from either side, nothing is waiting to be read.
"""

from __future__ import annotations

import math
from collections import deque
from types import TracebackType
from typing import Final, Protocol, Self

import trio
from h2.errors import ErrorCodes

from asyncgrpo_agent.errors import StreamDeadlineError, StreamResetError
from asyncgrpo_agent.wire.deadlines import StreamDeadlines, StreamTimer
from asyncgrpo_agent.wire.headers import Headers
from asyncgrpo_agent.wire.session import Session
from asyncgrpo_agent.wire.streams import BODY_BYTES

SEND_BYTES: Final = BODY_BYTES  # the most that one call queues above the high-water mark
_KNOWN_CODES: Final = frozenset(int(code) for code in ErrorCodes)


class Pump(Protocol):
    """What a stream needs of its link."""

    peer: str

    @property
    def closed(self) -> bool: ...
    def check(self) -> None: ...
    def touch(self) -> None: ...
    def forget(self, stream: LinkStream) -> None: ...


class LinkStream:
    """Both halves of a stream. Use it as a context manager: leaving early resets it."""

    def __init__(
        self,
        pump: Pump,
        session: Session,
        stream_id: int,
        headers: Headers,
        timer: StreamTimer,
        *,
        inbound: bool,
    ) -> None:
        self.stream_id = stream_id
        self.request_headers = headers
        self.handler_scope = trio.CancelScope()  # of the handler, if the peer opened the stream
        self._pump = pump
        self._session = session
        self._timer = timer
        self.inbound = inbound
        self._response: Headers | None = None
        # Data, and its bytes of flow control.
        self._received: deque[tuple[bytes | memoryview, int]] = deque()
        self._local_ended = False
        self._remote_ended = False
        self._dropped = False
        self._reset: StreamResetError | None = None
        self._waiters = trio.lowlevel.ParkingLot()  # mostly one task; each looks again when woken

    @property
    def peer(self) -> str:
        return self._pump.peer

    @property
    def done(self) -> bool:
        """Both halves have ended, or the stream was reset."""
        return self._reset is not None or (self._local_ended and self._remote_ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()

    # --- writing ---------------------------------------------------------------------------

    async def send(self, data: bytes | memoryview) -> None:
        """Queue `data`, waiting at the high-water mark. Raises StreamResetError, LinkError."""
        if len(data) <= SEND_BYTES:
            await self.send_whole(data)
            return
        whole = memoryview(data)  # cut without copying
        for start in range(0, len(data), SEND_BYTES):
            await self.send_whole(whole[start : start + SEND_BYTES])

    async def send_whole(self, data: bytes | memoryview) -> None:
        """Queue all of `data` at once or, when cancelled, none of it. For short messages."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        while not self._session.writable(self.stream_id):
            await self._waiters.park()
            self._check_open()
        self._session.send(self.stream_id, data)
        self._timer.queued_bytes += len(data)
        self._pump.touch()

    async def end(self) -> None:
        """End our half, behind what is queued."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if not self._local_ended:
            self._local_ended = True
            self._session.end(self.stream_id)
            self._settle()

    async def respond(self, headers: Headers) -> None:
        """Answer a stream that the peer opened."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        self._session.respond(self.stream_id, headers)
        self._pump.touch()

    def reset(self, code: int) -> None:
        """Give the stream up with RST_STREAM, and what is queued on it. Idempotent."""
        if not self._pump.closed:
            self._session.reset(self.stream_id, code)  # nothing happens if the session is past it
        if not self.done:
            self._reset = self._reset_error(code, safe_to_retry=False, by="this side")
        self._discard()
        self._settle()

    def give_up(self, error: StreamResetError) -> None:
        """Reset the stream; whoever waits for it gets `error`."""
        if not self.done:
            self._reset = error
        self.reset(error.code)

    def drop(self, code: int = ErrorCodes.CANCEL) -> None:
        """Nobody will use the stream again: reset it, unless an answer of ours is on its way."""
        if self.inbound and self._local_ended:
            self._dropped = True
            self._discard()
        elif not self.done or self._session.buffered_bytes(self.stream_id):
            self.reset(code)
        else:
            self._discard()

    # --- reading ---------------------------------------------------------------------------

    async def response(self) -> Headers:
        """Wait for the answer's headers. Raises StreamResetError, LinkError."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._response is None:
            self._check_open()
            await self._waiters.park()
        return self._response

    async def receive(self, max_bytes: int = SEND_BYTES) -> bytes | memoryview:
        """The next bytes, b"" at the end; large ones are a view of what was read, to be taken
        on or copied. Raises StreamResetError, LinkError.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._received:
            await self._more()
            if not self._received:
                return b""
        data, flow_bytes = self._take(max_bytes)
        self._acknowledge(flow_bytes)
        return data

    def limit(self, deadlines: StreamDeadlines) -> StreamTimer:
        """Part of `Link.limit`."""
        self._timer.deadlines = deadlines
        return self._timer

    def widen(self, more_bytes: int) -> None:
        """Let the peer send so much more before anybody has taken it: for long distances."""
        if not (self.done or self._pump.closed):
            self._session.widen(self.stream_id, more_bytes)
            self._pump.touch()

    async def _more(self) -> None:
        """Wait for bytes, or for the peer's end."""
        if self._remote_ended:
            return
        self._timer.reading_since = trio.current_time()
        try:
            while not (self._received or self._remote_ended):
                self._check_open()
                await self._waiters.park()
        finally:
            self._timer.reading_since = math.inf

    def _take(self, max_bytes: int) -> tuple[bytes | memoryview, int]:
        parts, room, flow_bytes = [], max_bytes, 0
        while self._received and len(self._received[0][0]) <= room:
            data, flow = self._received.popleft()
            parts.append(data)
            room -= len(data)
            flow_bytes += flow
        if not parts:
            data, flow = self._received.popleft()
            rest = data[max_bytes:]
            self._received.appendleft((rest, len(rest)))
            return data[:max_bytes], flow - len(rest)
        return parts[0] if len(parts) == 1 else b"".join(parts), flow_bytes

    # --- called by the link ----------------------------------------------------------------

    def on_response(self, headers: Headers) -> None:
        self._response = headers
        self._wake()

    def on_data(self, data: bytes | memoryview, flow_bytes: int) -> None:
        if self._reset is not None or self._dropped:
            self._acknowledge(flow_bytes)
            if self._dropped and not self._session.buffered_bytes(self.stream_id):
                self.reset(ErrorCodes.NO_ERROR)  # answered in full: the peer may stop uploading
            return
        self._received.append((data, flow_bytes))
        self._timer.begun = True
        self._wake()

    def on_end(self) -> None:
        self._remote_ended = True
        self._timer.begun = True
        self._settle()

    def on_reset(self, code: int, *, safe_to_retry: bool) -> None:
        self._reset = self._reset_error(code, safe_to_retry=safe_to_retry, by="the peer")
        if not self._remote_ended:  # a whole answer stays readable: its end may be all they reset
            self._discard()
        self.handler_scope.cancel()
        self._settle()

    def on_overdue(self, reason: str) -> None:
        """The peer took too long; whoever waits for it is told so."""
        self.handler_scope.cancel()  # first: once woken, a handler would get an error instead
        if not self.done:
            code, where = int(ErrorCodes.CANCEL), self._pump.peer
            error = StreamDeadlineError(reason, code=code, safe_to_retry=False, where=where)
            self.give_up(error)
        self.reset(ErrorCodes.CANCEL)

    def on_writable(self) -> None:
        self._wake()

    def on_loss(self) -> None:
        """The link is gone; whoever waits finds that out by `check`."""
        self.handler_scope.cancel()
        self._wake()

    # --- within ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._reset is not None:
            # A new object each time: an exception that several tasks raise mixes their tracebacks.
            known = self._reset
            raise type(known)(
                known.what, code=known.code, safe_to_retry=known.safe_to_retry, where=known.where
            )
        self._pump.check()

    def _reset_error(self, code: int, *, safe_to_retry: bool, by: str) -> StreamResetError:
        name = ErrorCodes(code).name if code in _KNOWN_CODES else f"code {code}"
        return StreamResetError(
            f"the stream was reset by {by}: {name}",
            code=code,
            safe_to_retry=safe_to_retry,
            where=self._pump.peer,
        )

    def _discard(self) -> None:
        flow_bytes = sum(flow for _, flow in self._received)
        self._received.clear()
        self._acknowledge(flow_bytes)

    def _acknowledge(self, flow_bytes: int) -> None:
        if flow_bytes and not self._pump.closed:
            self._session.acknowledge(self.stream_id, flow_bytes)
            self._pump.touch()

    def _settle(self) -> None:
        if self.done:
            self._pump.forget(self)
        self._wake()
        self._pump.touch()

    def _wake(self) -> None:
        if self._waiters:
            self._waiters.unpark_all()
