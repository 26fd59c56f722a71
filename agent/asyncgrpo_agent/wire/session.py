"""One HTTP/2 connection as a pure state machine: bytes in, events out, and the reverse.

Theory of operation. Inbound bytes pass the frame guard (`wire.frames`), the budgets
(`wire.budgets`) and then h2 (`wire.connection`), one frame at a time, so that what came before a
fault is still delivered. Outbound bodies wait in the outbox (`wire.buffers`) until `take_output`
moves them into frames as far as the peer's windows allow; headers, answers and resets overtake
them. Timers live in `wire.liveness`.

Invariants:
* No bytes from the peer make `receive` raise; a breach gives one SessionClosed with a
  PeerProtocolError, and GOAWAY is in the output.
* SessionClosed is the last event and comes exactly once.
* Every DataReceived is to be acknowledged exactly once, whatever became of its stream.
* A stream that is unknown here is normal: resets cross on the wire. Calls on it do nothing.

One owner mutates a session. It never waits between a mutation and `take_output`, and looks for
events (`take_events`, or `tick` when `next_deadline` is past) after calls that may cause some.
"""

from __future__ import annotations

from typing import Final, cast

import h2.events
from h2.connection import ConnectionState
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes
from hpack.exceptions import HPACKError
from hyperframe.exceptions import HyperframeError

from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.wire.budgets import Budgets
from asyncgrpo_agent.wire.buffers import Outbox, SendBuffer
from asyncgrpo_agent.wire.connection import Connection
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
from asyncgrpo_agent.wire.frames import Breach, Frame, FrameSplitter
from asyncgrpo_agent.wire.headers import Headers, check_request, check_response
from asyncgrpo_agent.wire.limits import Limits
from asyncgrpo_agent.wire.liveness import Liveness

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

OUTPUT_BYTES: Final = 64 << 10  # `take_output` stops filling here
_TURN_BYTES: Final = (32 << 10) - 9  # least for a stream's turn: with its head two TLS records
_STREAMS_BEFORE_SETTINGS: Final = 100  # what RFC 9113 recommends as the least peers allow
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


class Session:
    """Either end of a connection, in either HTTP/2 role.

    `strict_codec` lets errors that h2 ought not to raise through: for fuzz tests.
    """

    def __init__(
        self, *, client: bool, limits: Limits, now: float, strict_codec: bool = False
    ) -> None:
        self._client = client
        self._limits = limits
        self._codec_errors = () if strict_codec else _CODEC_ERRORS
        self._h2 = Connection(client=client, limits=limits)
        self._splitter = FrameSplitter(
            preface=not client,
            max_frame_bytes=limits.max_frame_bytes,
            max_header_bytes=limits.max_header_bytes,
        )
        self._budgets = Budgets(limits, client=client, now=now)
        self._outbox = Outbox(high_bytes=limits.send_high_bytes, low_bytes=limits.send_low_bytes)
        self._liveness = Liveness(limits, now)
        self._now = now
        self._events: list[Event] = []
        self._allowed_streams = _STREAMS_BEFORE_SETTINGS
        self._could_open = client
        self._ready = False
        self._closed = False

    # --- state ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """The peer's first SETTINGS came."""
        return self._ready

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def open_streams(self) -> int:
        return len(self._h2.streams)

    def can_open(self) -> bool:
        """Whether the peer's limit (100 before its SETTINGS) allows one more stream."""
        if self._closed or not self._client or self._streams_used_up():
            return False
        return len(self._h2.streams) < self._allowed_streams

    def writable(self, stream_id: int) -> bool:
        """Whether the buffer is below high water. True for a stream that is gone: writes to it
        do nothing, so there is nothing to wait for.
        """
        return self._outbox.writable(stream_id)

    def buffered_bytes(self, stream_id: int) -> int:
        buffer = self._outbox.get(stream_id)
        return buffer.size_bytes if buffer is not None else 0

    # --- from the peer, and from the clock -------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the peer; give what they mean, in order."""
        if self._closed:
            return self.take_events()
        self._now = now
        try:
            self._splitter.feed(data)
            while not self._closed and (frame := self._splitter.next_frame()) is not None:
                self._receive_frame(frame)
        except Breach as breach:
            self._refuse(breach.code, breach.reason)
        except ProtocolError as error:
            self._refuse(error.error_code, str(error))
        except self._codec_errors as error:
            self._refuse(ErrorCodes.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        if data:
            self._liveness.heard(now, block_open=self._splitter.block_open)
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

    def take_events(self) -> list[Event]:
        """Events that wait: calls from our side may cause StreamWritable and SlotsFreed."""
        events, self._events = self._events, []
        return events

    # --- to the peer -----------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """There is nothing to send and no event to take."""
        return not (self._events or self._h2.pending_bytes or self._outbox.waiting)

    def take_output(self) -> bytes:
        """Bytes to send now, about 64 KiB at most; b"" if there is nothing or no window."""
        if not self._closed:
            self._fill()
        return self._h2.data_to_send()

    def open_stream(self, headers: Headers, *, end: bool = False) -> int:
        """Begin a request. Raises RuntimeError unless `can_open()`, ValueError for bad headers."""
        if not self.can_open():
            raise RuntimeError("open_stream without can_open()")
        check_request(headers)
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, headers, end_stream=end)
        self._outbox.add(stream_id)
        self._mark(stream_id, ended=end)
        self._could_open = self.can_open()
        return stream_id

    def respond(self, stream_id: int, headers: Headers, *, end: bool = False) -> None:
        """Begin the response to a request, once."""
        check_response(headers)
        stream = self._h2.streams.get(stream_id)
        if self._closed or stream is None:
            return
        if self._client or stream.state_machine.headers_sent:
            raise RuntimeError(f"stream {stream_id} already has its headers")
        self._h2.send_headers(stream_id, headers, end_stream=end)
        self._mark(stream_id, ended=end)

    def send(self, stream_id: int, data: bytes) -> None:
        """Buffer body bytes behind those that wait. The caller looks at `writable` first."""
        buffer = self._outbox.get(stream_id)
        if buffer is not None and buffer.ending:
            raise RuntimeError(f"stream {stream_id} was ended")
        self._outbox.push(stream_id, data)

    def end(self, stream_id: int) -> None:
        """End our half once what is buffered has been sent."""
        buffer = self._outbox.get(stream_id)
        if buffer is None or buffer.ending:
            return
        buffer.ending = True
        if not buffer.size_bytes:  # needs no window, so it need not wait for its turn
            self._h2.end_stream(stream_id)
            self._settle(stream_id)

    def reset(self, stream_id: int, code: int) -> None:
        """Give the stream up. What the peer has under way for it is dropped here."""
        if self._closed or stream_id not in self._h2.streams:
            return
        self._h2.reset_stream(stream_id, code)
        self._h2.release(stream_id)
        self._outbox.drop(stream_id)
        self._budgets.stream_abandoned()
        self._look_for_slots()

    def acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        """The consumer took (or dropped) received bytes; give the peer its window back."""
        if not self._closed:
            self._h2.acknowledge_received_data(flow_bytes, stream_id)

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

    # --- outbound frames -------------------------------------------------------------------

    def _fill(self) -> None:
        """Move body bytes into frames, a turn for each stream, until a window or the call ends."""
        while (
            self._h2.pending_bytes < OUTPUT_BYTES
            and self._h2.outbound_flow_control_window > 0
            and (turn := self._outbox.next_turn()) is not None
        ):
            self._send_turn(*turn)

    def _send_turn(self, stream_id: int, buffer: SendBuffer) -> None:
        room = self._h2.send_room(stream_id)
        if not room:
            return  # out of the round until the peer opens the window
        share_bytes = (OUTPUT_BYTES - self._h2.pending_bytes) // (self._outbox.waiting + 1)
        turn_bytes = max(_TURN_BYTES, share_bytes)
        data = buffer.pull(min(room, turn_bytes, self._h2.max_outbound_frame_size))
        ended = buffer.ending and not buffer.size_bytes
        self._h2.send_data(stream_id, data, end_stream=ended)
        self._budgets.sent(len(data))
        if self._outbox.relieved(buffer):
            self._events.append(StreamWritable(stream_id))
        if ended:
            self._settle(stream_id)
        else:
            self._outbox.wake(stream_id)

    def _mark(self, stream_id: int, *, ended: bool) -> None:
        if ended and (buffer := self._outbox.get(stream_id)) is not None:
            buffer.ending = True
            self._settle(stream_id)

    # --- ends ------------------------------------------------------------------------------

    def _settle(self, stream_id: int) -> None:
        """Forget the stream if both sides have ended it."""
        if self._h2.release(stream_id) and stream_id in self._outbox:
            self._outbox.drop(stream_id)
            self._budgets.stream_ended()
            self._look_for_slots()

    def _look_for_slots(self) -> None:
        """Report the change from no free stream to one."""
        if self._client:
            can_open = self.can_open()
            if can_open and not self._could_open:
                self._events.append(SlotsFreed())
            self._could_open = can_open

    def _streams_used_up(self) -> bool:
        return self._h2.highest_outbound_stream_id >= self._h2.HIGHEST_ALLOWED_STREAM_ID - 1

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
