"""One link: the pump between a sans-IO Session and a byte stream, and its HTTP/2 streams.

Three tasks own the connection. The reader turns bytes into events; the writer is the only one that
ever calls `send_all`, because cancelling that call breaks a TLS stream; the keeper runs the
session's timers. Everybody else mutates the session synchronously, without a checkpoint on the
way, and wakes the writer: a request never touches the socket, cancelling one queues RST_STREAM.
The reader yields to other tasks after some milliseconds of work, and the keeper looks once a second
for streams whose peer takes too long (`wire.deadlines`): neither may one connection delay the
others, nor one stream outlive its use.

Invariants: bytes of a peer are acknowledged once somebody took them or nobody ever will, so flow
control bounds what waits here. The first failure is kept and is what every waiter gets. The cost
of an event does not depend on how many streams are open.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeVar

import trio
from h2.errors import ErrorCodes

from asyncgrpo_agent.errors import AgentError, LinkClosedError, LinkError, StreamDeadlineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link_stream import LinkStream as LinkStream
from asyncgrpo_agent.net.stranger_log import Severity, StrangerLog
from asyncgrpo_agent.net.tls_stream import send_parts
from asyncgrpo_agent.wire.deadlines import (
    KNOWN_PEERS,
    STRANGERS,
    UNLIMITED,
    StreamDeadlines,
    StreamTimer,
)
from asyncgrpo_agent.wire.events import (
    DataReceived,
    Event,
    PingAcked,
    ResponseStarted,
    SessionClosed,
    SessionReady,
    SlotsFreed,
    StreamEnded,
    StreamOpened,
    StreamReset,
    StreamWritable,
)
from asyncgrpo_agent.wire.headers import Headers
from asyncgrpo_agent.wire.limits import Limits
from asyncgrpo_agent.wire.session import Session

READ_BYTES: Final = 256 << 10  # more would let one connection delay the others
LINGER_S: Final = 1.0
FLUSH_S: Final = 2.0
LOOK_S: Final = 1.0  # between looks for streams that are overdue
WRITE_S: Final = 30.0  # in which the peer has to take at least one write

Handler = Callable[[LinkStream], Awaitable[None]]
StreamEvent = DataReceived | StreamEnded | ResponseStarted | StreamWritable | StreamReset
E = TypeVar("E", bound=BaseException)
log = Log(__name__)


class Link:
    """A connection to one peer. `run` must be running for anything else to make progress."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        session: Session,
        *,
        peer: str,
        on_authenticated: Callable[[], None] | None = None,
        stranger_log: StrangerLog | None = None,
    ) -> None:
        self.peer = peer
        self.rtt_s: float | None = None
        self._transport = stream
        self._session = session
        self._on_authenticated = on_authenticated
        self._stranger_log = stranger_log  # until the peer has proved who it is
        self._streams: dict[int, LinkStream] = {}
        self._timers: dict[int, StreamTimer] = {}  # with deadlines, until a look after their end
        self._look_due = math.inf
        self._inbound_deadlines = STRANGERS
        self._slots = trio.lowlevel.ParkingLot()
        self._output = trio.Event()
        self._drained = trio.lowlevel.ParkingLot()
        self._pause = trio.CancelScope()
        self._sending_since = math.inf
        self._loss: LinkError | None = None
        self._closed_by_us = False
        self._ending = trio.Event()
        self._flushed = trio.Event()
        self._peer_gone = trio.Event()
        self._spawn: Callable[[LinkStream], None]
        self._running = False
        self._done = trio.Event()

    @property
    def open_streams(self) -> int:
        return self._session.open_streams

    @property
    def closed(self) -> bool:
        return self._loss is not None

    async def run(
        self, handler: Handler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Pump until the connection ends; each stream that the peer opens gets a `handler` task.

        A peer's reset cancels the handler of that stream; an AgentError in it resets the stream.
        Raises LinkError with the reason unless `aclose` was called here.
        """
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                self._spawn = lambda stream: nursery.start_soon(self._serve, handler, stream)
                for task in (self._read, self._write, self._keep):
                    nursery.start_soon(task)
                task_status.started()
                await self._ending.wait()
                with trio.move_on_after(FLUSH_S):
                    await self._flushed.wait()
                    await self._linger()
                nursery.cancel_scope.cancel()
        finally:
            self._end(LinkError("the link was stopped here"), by_us=True)
            self._done.set()
            await trio.aclose_forcefully(self._transport)
        if not self._closed_by_us:
            self.check()

    async def _linger(self) -> None:
        """After our goodbye, let the peer close first.

        Closing a socket on bytes that nobody read resets the connection, and the reset can
        overtake what we sent last.
        """
        if self._closed_by_us:
            with trio.move_on_after(LINGER_S):
                await self._peer_gone.wait()

    async def open(self, headers: Headers, deadlines: StreamDeadlines = UNLIMITED) -> LinkStream:
        """Open a stream, once the peer's limit allows one more. Raises LinkError.

        If the peer exceeds a deadline, the stream is reset and whoever waits gets a
        StreamDeadlineError; whoever waits here for longer than the whole stream may take, too.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check()
        if not self._has_slot():
            await self._wait_for_slot(deadlines.total_s)
        stream_id = self._session.open_stream(headers)
        stream = self._add(stream_id, headers, deadlines, inbound=False)
        self.touch()
        return stream

    async def _wait_for_slot(self, most_s: float) -> None:
        with trio.move_on_after(most_s):
            while not self._has_slot():
                await self._slots.park()
                self.check()
            return
        raise StreamDeadlineError(
            f"the peer allowed no more streams for {most_s:g} s",
            code=ErrorCodes.CANCEL,
            safe_to_retry=True,
            where=self.peer,
        )

    async def aclose(self, reason: str) -> None:
        """Send what can be sent, say goodbye and close, all within a few seconds."""
        if self._running and self._loss is None:
            with trio.move_on_after(FLUSH_S):
                self._output.set()
                await self._drained.park()
        if self._loss is None:
            self._session.close(ErrorCodes.NO_ERROR, reason)
            self._end(LinkError(f"the link was closed here: {reason}"), by_us=True)
        if self._running:
            await self._done.wait()
        else:
            await trio.aclose_forcefully(self._transport)

    def authenticated(
        self,
        limits: Limits,
        ping_s: float,
        ping_deadline_s: float,
        deadlines: StreamDeadlines = KNOWN_PEERS,
    ) -> None:
        """The peer has proved who it is: from here on it may use the link for real work.

        `deadlines` are for streams that it opens from now on. What is open already is the control
        stream, as long as the link, which has none.
        """
        self._inbound_deadlines = deadlines
        self._stranger_log = None
        self._timers.clear()
        self._session.raise_limits(limits)
        self._session.set_ping(ping_s, ping_deadline_s, trio.current_time())
        self._output.set()  # the keeper has another deadline, if nothing else
        if self._on_authenticated is not None:
            self._on_authenticated()

    def limit(self, stream: LinkStream, deadlines: StreamDeadlines) -> None:
        """Have a stream end by other deadlines than it began with, from its opening as ever."""
        self._watch(stream.stream_id, stream.limit(deadlines))

    # --- for the streams of this link ------------------------------------------------------

    def check(self) -> None:
        """Raise LinkError if the link is gone."""
        if self._loss is not None:
            # A new object each time: an exception that many tasks raise collects their tracebacks.
            raise type(self._loss)(self._loss.what, where=self._loss.where, fix=self._loss.fix)

    def touch(self) -> None:
        """The session was changed: have the writer look for bytes and events, if there are any."""
        if not (self._output.is_set() or self._session.idle):
            self._output.set()

    def forget(self, stream: LinkStream) -> None:
        """Nothing that the peer sends can concern this stream any more."""
        self._streams.pop(stream.stream_id, None)

    # --- the three tasks -------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while data := await self._transport.receive_some(READ_BYTES):
                if self._loss is None:  # else it only waits for the peer to close
                    self._dispatch(self._session.receive(data, trio.current_time()))
                    self.touch()
                while self._session.backlog and self._loss is None:
                    await trio.lowlevel.checkpoint()
                    self._dispatch(self._session.receive(b"", trio.current_time()))
                    self.touch()
            self._end(LinkError("the peer closed the connection"))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(LinkError(f"the connection broke: {error.__cause__ or error}"))
        finally:
            self._peer_gone.set()

    async def _write(self) -> None:
        try:
            while True:
                parts = self._session.take_parts()
                self._dispatch(self._session.take_events())
                if parts:
                    self._sending_since = trio.current_time()
                    await send_parts(self._transport, parts)
                    self._sending_since = math.inf
                elif self._loss is not None:
                    return
                else:
                    self._drained.unpark_all()
                    self._output = trio.Event()
                    await self._output.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(LinkError(f"the connection broke: {error.__cause__ or error}"))
        finally:
            self._flushed.set()

    async def _keep(self) -> None:
        while True:
            deadline = self._session.next_deadline()
            with trio.move_on_after(WRITE_S) as self._pause:
                self._wake_keeper(min(self._look_due, math.inf if deadline is None else deadline))
                await trio.sleep_forever()
            now = trio.current_time()
            if now - self._sending_since > WRITE_S:
                self._end(LinkError(f"the peer has read nothing for {WRITE_S:g} s"))
            if now >= self._look_due:
                self._look(now)
            self._dispatch(self._session.tick(now))
            self.touch()

    def _wake_keeper(self, deadline: float) -> None:
        if deadline < self._pause.deadline:
            self._pause.deadline = deadline

    def _look(self, now: float) -> None:
        """Give up the streams whose peer takes too long."""
        session = self._session
        for stream_id, timer in list(self._timers.items()):
            if not session.is_open(stream_id):
                del self._timers[stream_id]
                continue
            unsent_bytes = session.buffered_bytes(stream_id)
            window_open = not unsent_bytes or session.window_open(stream_id)
            reason = timer.overdue(now, unsent_bytes=unsent_bytes, window_open=window_open)
            if reason is not None:
                self._give_up(stream_id, reason)
        self._look_due = now + LOOK_S if self._timers else math.inf

    def _give_up(self, stream_id: int, reason: str) -> None:
        del self._timers[stream_id]
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.on_overdue(reason)
        else:  # both sides have said all, but the peer does not take it
            self._session.reset(stream_id, ErrorCodes.CANCEL)
        if stream is None or stream.inbound:  # else somebody gets the error
            self._note(log.info, "stream.overdue", stream=stream_id, reason=reason)

    def _note(self, severity: Severity, event: str, **fields: object) -> None:
        if self._stranger_log is not None:
            self._stranger_log.note(severity, event, "", peer=self.peer, **fields)
        else:
            severity(event, peer=self.peer, **fields)

    # --- events ----------------------------------------------------------------------------

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case StreamOpened(stream_id=stream_id, headers=headers):
                    self._accept(stream_id, headers)
                case PingAcked(rtt_s=rtt_s):
                    self.rtt_s = rtt_s
                case SessionClosed(error=error, reason=reason):
                    self._end(error or LinkClosedError(reason))
                case SessionReady() | SlotsFreed():
                    pass  # looked for below, in case that a waiter gave its slot up
                case _:
                    self._dispatch_to_stream(event)
        if self._slots and self._has_slot():
            self._slots.unpark()  # whoever opens a stream brings us here again for the next
        deadline = self._session.next_deadline()
        if deadline is not None:
            self._wake_keeper(deadline)

    def _dispatch_to_stream(self, event: StreamEvent) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:  # late news of a stream that was given up here
            if isinstance(event, DataReceived):
                self._session.acknowledge(event.stream_id, event.flow_bytes)
            return
        match event:
            case DataReceived(data=data, flow_bytes=flow_bytes):
                stream.on_data(data, flow_bytes)
            case StreamEnded():
                stream.on_end()
            case ResponseStarted(headers=headers):
                stream.on_response(headers)
            case StreamWritable():
                stream.on_writable()
            case StreamReset(code=code, safe_to_retry=safe_to_retry):
                stream.on_reset(code, safe_to_retry=safe_to_retry)

    def _has_slot(self) -> bool:
        """Not before the peer's SETTINGS: it would refuse what is beyond its true limit."""
        return self._session.ready and self._session.can_open()

    def _accept(self, stream_id: int, headers: Headers) -> None:
        self._spawn(self._add(stream_id, headers, self._inbound_deadlines, inbound=True))

    def _add(
        self, stream_id: int, headers: Headers, deadlines: StreamDeadlines, *, inbound: bool
    ) -> LinkStream:
        now = trio.current_time()
        timer = StreamTimer(deadlines, now)
        if deadlines is not UNLIMITED:
            self._watch(stream_id, timer)
        stream = LinkStream(self, self._session, stream_id, headers, timer, inbound=inbound)
        self._streams[stream_id] = stream
        return stream

    def _watch(self, stream_id: int, timer: StreamTimer) -> None:
        self._timers[stream_id] = timer
        if self._look_due == math.inf:
            self._look_due = trio.current_time() + LOOK_S
            self._wake_keeper(self._look_due)

    async def _serve(self, handler: Handler, stream: LinkStream) -> None:
        with stream.handler_scope:
            try:
                await handler(stream)
            except* AgentError as group:
                if self._loss is None and not stream.done:
                    self._note(log.warning, "stream.failed", reason=str(next(leaves(group))))
                stream.drop(ErrorCodes.INTERNAL_ERROR)
            finally:
                stream.drop()

    def _end(self, loss: LinkError, *, by_us: bool = False) -> None:
        """Keep the first reason, wake everybody who waits, have `run` come to its end."""
        if self._loss is None:
            self._loss = type(loss)(loss.what, where=self.peer, fix=loss.fix)
            self._closed_by_us = by_us
            for stream in list(self._streams.values()):
                stream.on_loss()
            self._streams.clear()
            self._slots.unpark_all()
            self._drained.unpark_all()
            self._output.set()
            self._ending.set()


def leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    """The errors themselves, of however many nurseries they came through."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
