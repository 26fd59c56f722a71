"""One HTTP/2 connection as a pure state machine: bytes in, events out, and the reverse.

Theory of operation. Inbound bytes pass the frame guard (`wire.frames`), the budgets
(`wire.budgets`) and then h2 (`wire.connection`), one frame at a time, so that what came before a
fault is still delivered. What our own side does with streams, and how bodies leave, is in
`wire.streams`, whose state this class shares; timers live in `wire.liveness`.

Invariants:
* No bytes from the peer make `receive` raise; a breach gives one SessionClosed with a
  PeerProtocolError, and GOAWAY is in the output.
* SessionClosed is the last event and comes exactly once.
* Every DataReceived is to be acknowledged exactly once, whatever became of its stream.

One owner mutates a session. It never waits between a mutation and `take_output`, and looks for
events (`take_events`, or `tick` when `next_deadline` is past) after calls that may cause some.
"""

from __future__ import annotations

import math
from typing import Final, cast

import h2.events
from h2.connection import ConnectionState
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes
from hpack.exceptions import HPACKError
from hyperframe.exceptions import HyperframeError

from asyncgrpo_agent.errors import LinkError, PeerProtocolError
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
from asyncgrpo_agent.wire.frames import (
    CONTINUATION,
    DATA,
    HEAD_BYTES,
    HEADERS,
    SETTINGS,
    Breach,
    Frame,
    FrameSplitter,
)
from asyncgrpo_agent.wire.headers import Headers
from asyncgrpo_agent.wire.limits import Limits
from asyncgrpo_agent.wire.liveness import Liveness
from asyncgrpo_agent.wire.streams import Streams

# Users of a session take its events from here.
__all__ = [
    "DataReceived",
    "Event",
    "Headers",
    "PingAcked",
    "ResponseStarted",
    "Session",
    "SessionClosed",
    "SessionReady",
    "SlotsFreed",
    "StreamEnded",
    "StreamOpened",
    "StreamReset",
    "StreamWritable",
]

WORK_A_CALL: Final = 64  # of `receive`, in units of `_work_of`: 5 ms at worst
_REASON_BYTES: Final = 200
_PAST: Final = float("-inf")

# What h2 and its parsers raise besides ProtocolError when bytes surprise them.
_CODEC_ERRORS: Final = (
    H2Error,
    HPACKError,
    HyperframeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)


class Session(Streams):
    """Either end of a connection, in either HTTP/2 role.

    `strict_codec` lets errors that h2 ought not to raise through: for fuzz tests.
    """

    def __init__(
        self, *, client: bool, limits: Limits, now: float, strict_codec: bool = False
    ) -> None:
        super().__init__(client=client, limits=limits, now=now)
        self._codec_errors = () if strict_codec else _CODEC_ERRORS
        self._splitter = FrameSplitter(
            preface=not client,
            max_frame_bytes=limits.max_frame_bytes,
            max_header_bytes=limits.max_header_bytes,
        )
        self._liveness = Liveness(limits, now)
        self._now = now
        self._ready = False
        self._backlog = False

    # --- state ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """The peer's first SETTINGS came."""
        return self._ready

    @property
    def backlog(self) -> bool:
        """Frames may be left that `receive` has yet to look at."""
        return self._backlog

    # --- from the peer, and from the clock -------------------------------------------------

    def receive(self, data: bytes | bytearray, now: float) -> list[Event]:
        """Take bytes from the peer; give what they mean, in order.

        One call does a few milliseconds of work at most. While `backlog` says that frames are
        left, let others work, then call it again without bytes.
        """
        if self._closed:
            return self.take_events()
        self._now = now
        if data:
            self._splitter.feed(data)
            self._liveness.heard(now)
        block_open, work = self._splitter.block_open, WORK_A_CALL
        try:
            while (
                work > 0 and not self._closed and (frame := self._splitter.next_frame()) is not None
            ):
                self._receive_frame(frame)
                work -= 1 if frame.kind == DATA else self._work_of(frame)
        except Breach as breach:
            self._refuse(breach.code, breach.reason)
        except ProtocolError as error:
            self._refuse(error.error_code, str(error))
        except self._codec_errors as error:
            self._refuse(ErrorCodes.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        self._backlog = work <= 0 and not self._closed and self._splitter.held_bytes >= HEAD_BYTES
        if work < WORK_A_CALL and not (block_open and self._splitter.block_open):
            self._liveness.finished()
        if not self._backlog:
            self._liveness.unfinished(now, self._frame_deadline_s())
        return self.take_events()

    def tick(self, now: float) -> list[Event]:
        """Do what is due: a PING, or the end of a peer that is gone."""
        self._now = now
        if not self._closed:
            if (reason := self._liveness.overdue(now)) is not None:
                self._end(ErrorCodes.NO_ERROR, LinkError(reason), reason)
            elif self._streams_used_up():
                reason = "this connection has used all its stream numbers"
                self._end(ErrorCodes.NO_ERROR, LinkError(reason), reason)
            elif (payload := self._liveness.ping_due(now)) is not None:
                self._h2.ping(payload)
        return self.take_events()

    def next_deadline(self) -> float | None:
        """When `tick` is due: in the past while events wait, None when all is over."""
        if self._events:
            return _PAST
        return None if self._closed else self._liveness.next_deadline()

    # --- the connection as a whole ---------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        """Say goodbye. Of all that comes afterwards only SessionClosed is reported."""
        if not self._closed:
            self._events.clear()
            self._end(code, None, reason)

    def set_ping(self, ping_s: float, ping_deadline_s: float, now: float) -> None:
        """Liveness as it was agreed at registration."""
        self._liveness.set_ping(ping_s, ping_deadline_s, now)

    def raise_limits(self, limits: Limits) -> None:
        """The peer has registered: allow it more. Limits on what it may send never shrink."""
        if self._closed:
            return
        self._h2.raise_limits(self._limits, limits)
        self._splitter.max_frame_bytes = limits.max_frame_bytes
        self._splitter.max_header_bytes = limits.max_header_bytes
        self._outbox.high_bytes = limits.send_high_bytes
        self._outbox.low_bytes = limits.send_low_bytes
        self._budgets.set_limits(limits)
        self._limits = limits
        if not self._backlog:
            self._liveness.unfinished(self._now, self._frame_deadline_s())

    # --- inbound frames --------------------------------------------------------------------

    def _receive_frame(self, frame: Frame) -> None:
        known = frame.stream_id in self._h2.streams
        self._budgets.charge_frame(frame, self._now, known=known)
        for event in self._h2.receive_frame(frame):
            self._on_h2_event(event)
        if frame.stream_id and not self._closed:
            self._settle(frame.stream_id)
        if self._h2.pending_bytes > self._limits.max_control_bytes:
            raise Breach(ErrorCodes.ENHANCE_YOUR_CALM, "the peer does not read our answers")

    def _work_of(self, frame: Frame) -> int:
        """In units of 80 microseconds at worst, as measured: header fields of one byte each, and
        SETTINGS that move the windows of all streams, are the dearest for their size."""
        if frame.kind in (HEADERS, CONTINUATION):
            return 1 + (frame.length >> 4)
        if frame.kind == SETTINGS:
            return 1 + (len(self._h2.streams) >> 7)
        return 1

    def _frame_deadline_s(self) -> float:
        """How long the frame or header block that has begun may take."""
        begun = self._splitter.begun
        if begun == DATA:
            return self._limits.data_frame_deadline_s
        if begun is None and not self._splitter.block_open:
            return math.inf
        return self._limits.header_block_deadline_s

    def _on_h2_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._on_data(event)
            case h2.events.StreamEnded():
                self._tell(StreamEnded(event.stream_id), event.stream_id)
            case h2.events.RequestReceived():
                self._on_request(event.stream_id, event.headers)
            case h2.events.ResponseReceived():
                headers = cast("Headers", event.headers)
                self._tell(ResponseStarted(event.stream_id, headers), event.stream_id)
            case h2.events.StreamReset():
                self._on_reset(event)
            case h2.events.WindowUpdated():
                self._on_window(event.stream_id)
            case h2.events.RemoteSettingsChanged():
                self._on_settings(event)
            case h2.events.PingAckReceived():
                rtt_s = self._liveness.acked(event.ping_data, self._now)
                if rtt_s is not None:
                    self._events.append(PingAcked(rtt_s))
            case h2.events.ConnectionTerminated():
                self._on_goaway(event)
            case _:
                pass  # trailers, informational responses, PINGs that h2 answered, the unknown

    def _tell(self, event: Event, stream_id: int) -> None:
        """Report an event of a stream that the owner knows of."""
        if stream_id in self._outbox:
            self._events.append(event)

    def _on_request(self, stream_id: int, headers: object) -> None:
        if len(self._h2.streams) > self._limits.max_streams:
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._outbox.add(stream_id)
        self._events.append(StreamOpened(stream_id, cast("Headers", headers)))

    def _on_data(self, event: h2.events.DataReceived) -> None:
        stream_id, flow_bytes = event.stream_id, event.flow_controlled_length
        if stream_id not in self._outbox or not event.data:
            self._h2.acknowledge_received_data(flow_bytes, stream_id)
        else:
            self._events.append(DataReceived(stream_id, event.data, flow_bytes))

    def _on_reset(self, event: h2.events.StreamReset) -> None:
        code = int(event.error_code or 0)
        safe = event.remote_reset and code == ErrorCodes.REFUSED_STREAM
        self._tell(StreamReset(event.stream_id, code, safe), event.stream_id)
        self._outbox.drop(event.stream_id)
        self._h2.release(event.stream_id)
        self._look_for_slots()

    def _on_window(self, stream_id: int | None) -> None:
        if stream_id:
            self._outbox.wake(stream_id)

    def _on_settings(self, event: h2.events.RemoteSettingsChanged) -> None:
        if not self._ready:
            self._ready = True
            self._liveness.ready()
            self._events.append(SessionReady())
        self._allowed_streams = int(self._h2.remote_settings.max_concurrent_streams)
        if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
            self._outbox.wake_all()
        self._look_for_slots()

    def _on_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        said = (event.additional_data or b"")[:_REASON_BYTES].decode("utf-8", "replace")
        code = int(event.error_code or 0)
        reason = "the peer closed the connection" + (f": {said}" if said else "")
        error = None
        if code != ErrorCodes.NO_ERROR:
            reason = f"{reason} (HTTP/2 error {code})"
            error = LinkError(reason)
        self._end(None, error, reason)

    # --- ends ------------------------------------------------------------------------------

    def _refuse(self, code: int, reason: str) -> None:
        """The peer broke the protocol."""
        self._end(code, PeerProtocolError(f"the peer broke the protocol: {reason}"), reason)

    def _end(self, code: int | None, error: LinkError | None, reason: str) -> None:
        """The end, once. With a code, GOAWAY tells the peer, unless h2 has already done so."""
        self._closed = True
        if code is not None and self._h2.state_machine.state is not ConnectionState.CLOSED:
            debug = reason.encode("utf-8", "replace")[:_REASON_BYTES]
            self._h2.close_connection(code, additional_data=debug)
        self._outbox.clear()
        self._events.append(SessionClosed(error, reason))
