"""The streams of one connection and what we do with them: open, answer, send, end, give up.

The half of a session that our own side drives (`wire.session` is the other). Bodies wait in the
outbox until `take_output` moves them into frames, a turn for each stream, as far as the peer's
windows allow; headers, answers and resets overtake them.

A stream is forgotten as soon as both sides have ended it or one has given it up. One that is
unknown here is normal: resets cross on the wire. Calls on it do nothing.
"""

from __future__ import annotations

from typing import Final

from asyncgrpo_agent.wire.budgets import Budgets
from asyncgrpo_agent.wire.buffers import Outbox, SendBuffer
from asyncgrpo_agent.wire.connection import Connection
from asyncgrpo_agent.wire.events import Event, SlotsFreed, StreamWritable
from asyncgrpo_agent.wire.frames import HEAD_BYTES
from asyncgrpo_agent.wire.headers import Headers, check_request, check_response
from asyncgrpo_agent.wire.limits import Limits

OUTPUT_BYTES: Final = 256 << 10  # `take_output` stops filling here
BODY_BYTES: Final = (128 << 10) - HEAD_BYTES  # a stream's turn: with its head eight TLS records
_STREAMS_BEFORE_SETTINGS: Final = 100  # what RFC 9113 recommends as the least peers allow


class Streams:
    """State of a session, and its calls that concern streams."""

    def __init__(self, *, client: bool, limits: Limits, now: float) -> None:
        self._client = client
        self._limits = limits
        self._h2 = Connection(client=client, limits=limits)
        self._budgets = Budgets(limits, client=client, now=now)
        self._outbox = Outbox(high_bytes=limits.send_high_bytes, low_bytes=limits.send_low_bytes)
        self._events: list[Event] = []
        self._allowed_streams = _STREAMS_BEFORE_SETTINGS
        self._could_open = client
        self._closed = False

    # --- state ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def open_streams(self) -> int:
        return len(self._h2.streams)

    def is_open(self, stream_id: int) -> bool:
        """Whether anything can still be sent or received on the stream."""
        return stream_id in self._h2.streams

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

    def window_open(self, stream_id: int) -> bool:
        """Whether the peer takes bytes on this open stream now."""
        return self._h2.send_room(stream_id) > 0

    # --- what our side does ----------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """There is nothing to send and no event to take."""
        return not (self._events or self._h2.pending_bytes or self._outbox.waiting)

    def take_events(self) -> list[Event]:
        """Events that wait: calls from our side may cause StreamWritable and SlotsFreed."""
        events, self._events = self._events, []
        return events

    def take_output(self) -> bytes:
        """Bytes to send now, about 256 KiB at most; b"" if there is nothing or no window."""
        return b"".join(self.take_parts())

    def take_parts(self) -> list[bytes | bytearray | memoryview]:
        """The same in pieces: large bodies are not copied. None is empty."""
        if not self._closed:
            self._fill()
        return self._h2.parts_to_send()

    def open_stream(self, headers: Headers, *, end: bool = False) -> int:
        """Begin a request. Raises RuntimeError unless `can_open()`, ValueError for bad headers."""
        if not self.can_open():
            raise RuntimeError("open_stream without can_open()")
        check_request(headers)
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_head(stream_id, headers, end=end)
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
        self._h2.send_head(stream_id, headers, end=end)
        self._mark(stream_id, ended=end)

    def send(self, stream_id: int, data: bytes | memoryview) -> None:
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

    def widen(self, stream_id: int, more_bytes: int) -> None:
        """Let the peer send so much more on this stream before its consumer has taken it."""
        stream = self._h2.streams.get(stream_id)
        if not self._closed and stream is not None and stream.open:
            self._h2.increment_flow_control_window(more_bytes, stream_id)

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
        data = buffer.pull(min(room, BODY_BYTES, self._h2.max_outbound_frame_size))
        ended = buffer.ending and not buffer.size_bytes
        self._h2.send_body(stream_id, data, end=ended)
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

    # --- ends and slots --------------------------------------------------------------------

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
