"""h2's connection, made fast and mild. With `wire.h2_stream` the only module that reaches into h2.

What differs from a plain H2Connection, and why:

* The settings we want are in the very first SETTINGS frame, and h2's derived attributes agree.
* HPACK is stateless (`wire.hpack_codec`). We advertise a table of size 0.
* Pieces of bodies that are in order skip h2's frame objects and its formatting of log lines; every
  change of state is still made by its state machines.
* Header validation stays on. What is memoised is the outcome of blocks that passed it. Outbound
  lists are checked by `wire.headers` instead of by h2.
* Open streams are counted in O(1): finished streams are released at once, so the length of h2's
  table is the count (h2 walks the table for each new stream).
* A malformed message is a fault of its stream, not of the connection. Data that arrives late on a
  stream that we reset is credited silently, without another RST_STREAM for each frame.
* Streams above our limit are not refused here: h2 would end the connection. The session does it.
"""

from __future__ import annotations

from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, ConnectionState, H2Connection
from h2.events import DataReceived, Event, RequestReceived, ResponseReceived
from h2.exceptions import (
    ProtocolError,
    StreamClosedError,
    StreamIDTooLowError,
)
from h2.settings import ChangedSetting, SettingCodes, Settings
from h2.stream import H2Stream, StreamClosedBy, StreamInputs, StreamState
from h2.utilities import HeaderValidationFlags
from h2.windows import WindowManager
from hpack.struct import Header
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from asyncgrpo_agent.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PREFACE,
    head_of,
)
from asyncgrpo_agent.wire.frames import Frame as WholeFrame
from asyncgrpo_agent.wire.h2_stream import (
    PlainData,
    PlainHeaders,
    Stream,
    ValidatedMemo,
    plain_frame,
)
from asyncgrpo_agent.wire.headers import Headers, value_of
from asyncgrpo_agent.wire.hpack_codec import MemoDecoder, StatelessEncoder
from asyncgrpo_agent.wire.limits import Limits

_KNOWN_SETTINGS: Final = frozenset(SettingCodes)
_LARGE_BODY_BYTES: Final = 4 << 10  # one less costs more to keep apart than to copy

# States in which pieces of a body may come and go.
_OPEN: Final = (ConnectionState.CLIENT_OPEN, ConnectionState.SERVER_OPEN)
_SENDING: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)
_RECEIVING: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)

# What h2 checks the first headers of a stream for, by whether we are the client.
_OF_BEGIN: Final = {
    client: HeaderValidationFlags(
        is_client=client, is_trailer=False, is_response_header=client, is_push_promise=False
    )
    for client in (False, True)
}


class Connection(H2Connection):
    """One HTTP/2 connection, fed frame by frame. Raises ProtocolError for the peer's faults."""

    MAX_CLOSED_STREAMS = 1 << 14  # how each ended is kept, for frames that come late

    def __init__(self, *, client: bool, limits: Limits) -> None:
        super().__init__(
            H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_outbound_headers=False,  # wire.headers has done both
                normalize_outbound_headers=False,
            )
        )
        self._memo: ValidatedMemo = {}
        self._queued: list[
            bytes | bytearray | memoryview
        ] = []  # to be sent ahead of what h2 keeps itself
        self._queued_bytes = 0
        self._frame_dispatch_table[PlainData] = self._receive_data_frame
        self._frame_dispatch_table[PlainHeaders] = self._receive_headers_frame
        self._encoder = StatelessEncoder()
        self.encoder = self._encoder
        self._memo_decoder = MemoDecoder(
            max_list_bytes=limits.max_header_bytes, max_fields=limits.max_header_fields
        )
        self.decoder = self._memo_decoder
        self.local_settings = Settings(client=client, initial_values=settings_of(limits))
        self.max_inbound_frame_size = limits.max_frame_bytes
        self.initiate_connection()
        # No setting moves the connection's own window; it starts at 65,535 bytes.
        self._widen(limits.connection_window_bytes - self.inbound_flow_control_window)
        if not client:
            self.receive_data(PREFACE)  # the splitter has taken the real one off the wire

    def raise_limits(self, old: Limits, new: Limits) -> None:
        """Tell the peer about larger limits. They hold for h2 once the peer acknowledges them."""
        before, after = settings_of(old), settings_of(new)
        changes: dict[SettingCodes | int, int] = {
            code: value for code, value in after.items() if value != before[code]
        }
        if changes:
            self.update_settings(changes)
        self._memo_decoder.max_fields = new.max_header_fields
        self._widen(new.connection_window_bytes - old.connection_window_bytes)

    @property
    def _is_open(self) -> bool:
        return self.state_machine.state in _OPEN

    def _widen(self, more_bytes: int) -> None:
        if more_bytes > 0:
            self.increment_flow_control_window(more_bytes)

    # --- streams -------------------------------------------------------------------------

    @property
    def open_outbound_streams(self) -> int:
        return len(self.streams)

    @property
    def open_inbound_streams(self) -> int:
        return -1  # one too many must not be h2's business, even where the limit is none

    def release(self, stream_id: int) -> bool:
        """Forget the stream if both sides are done with it; say whether it is gone."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return True
        if not stream.closed:
            return False
        del self.streams[stream_id]
        self._closed_streams[stream_id] = stream.closed_by
        return True

    def send_room(self, stream_id: int) -> int:
        """Body bytes that may be sent on the stream now; a shrunk window counts as none."""
        window = self.streams[stream_id].outbound_flow_control_window
        return max(0, min(window, self.outbound_flow_control_window))

    @property
    def pending_bytes(self) -> int:
        return self._queued_bytes + len(self._data_to_send)

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        outbound = self._stream_id_is_outbound(stream_id)
        highest = self.highest_outbound_stream_id if outbound else self.highest_inbound_stream_id
        if stream_id <= highest:
            raise StreamIDTooLowError(stream_id, highest)
        if stream_id % 2 != int(allowed_ids):
            raise ProtocolError("Invalid stream ID for peer.")
        if not outbound and self.config.client_side:
            raise ProtocolError("A server may not open streams.")
        stream = Stream(
            stream_id,
            config=self.config,
            inbound_window_size=self.local_settings.initial_window_size,
            outbound_window_size=self.remote_settings.initial_window_size,
            memo=self._memo,
        )
        stream.max_outbound_frame_size = self.max_outbound_frame_size
        self.streams[stream_id] = stream
        if outbound:
            self.highest_outbound_stream_id = stream_id
        else:
            self.highest_inbound_stream_id = stream_id
        return stream

    # --- frames --------------------------------------------------------------------------

    def receive_frame(self, frame: WholeFrame) -> list[Event]:
        """One frame as it was cut. Nearly all of them need not be parsed once more by h2."""
        try:
            if (stream := self._stream_of_body(frame)) is not None:
                return self._receive_body(stream, frame)
            if (headers := self._headers_of_begin(frame)) is not None:
                return self._receive_begin(frame, headers)
            if (plain := plain_frame(frame)) is not None:
                return self._receive_frame(plain)
        except ProtocolError as error:  # as in h2's `receive_data`
            self._terminate_connection(error.error_code)
            raise
        return self.receive_data(frame.raw)

    def _stream_of_body(self, frame: WholeFrame) -> H2Stream | None:
        """The stream, if the frame is a piece of a body that is in order."""
        if frame.kind != DATA or frame.flags & PADDED:
            return None
        stream = self.streams.get(frame.stream_id)
        if stream is None or not self._is_open:
            return None
        machine, expected = stream.state_machine, stream._expected_content_length
        if expected is not None:
            missing = expected - stream._actual_content_length - frame.length
            if missing < 0 or (missing and frame.flags & END_STREAM):
                return None
        return stream if machine.headers_received and machine.state in _RECEIVING else None

    def _receive_body(self, stream: H2Stream, frame: WholeFrame) -> list[Event]:
        """What h2 does with such a piece, at a quarter of the price."""
        self._inbound_flow_control_window_manager.window_consumed(frame.length)
        stream._inbound_window_manager.window_consumed(frame.length)
        stream._actual_content_length += frame.length
        data = DataReceived(
            stream_id=frame.stream_id,
            data=cast("bytes", frame.body),
            flow_controlled_length=frame.length,
        )
        if frame.flags & END_STREAM:
            return [data, *stream.state_machine.process_input(StreamInputs.RECV_END_STREAM)]
        return [data]

    def _headers_of_begin(self, frame: WholeFrame) -> list[Header] | None:
        """The headers, if with them a request or a response begins in order, and passed before.

        Those with a length, which h2 reads, and informational ones are left to h2.
        """
        if frame.kind != HEADERS or frame.flags & ~END_STREAM != END_HEADERS or not self._is_open:
            return None
        stream, client_side = self.streams.get(frame.stream_id), self.config.client_side
        if client_side:
            machine = stream.state_machine if stream is not None else None
            if machine is None or machine.headers_received or machine.state not in _RECEIVING:
                return None
        elif (
            stream is not None
            or not frame.stream_id & 1
            or frame.stream_id <= self.highest_inbound_stream_id
        ):
            return None
        decoded = self._memo_decoder.known(frame.body)
        headers = self._memo.get((decoded, _OF_BEGIN[client_side])) if decoded else None
        if headers is None or any(name == b"content-length" for name, _ in headers):
            return None
        if stream is not None and (stream.request_method == b"HEAD" or headers[0][1][:1] == b"1"):
            return None
        return headers

    def _receive_begin(self, frame: WholeFrame, headers: list[Header]) -> list[Event]:
        """What h2 does with such headers, at a third of the price."""
        stream = self.streams.get(frame.stream_id)
        if stream is None:
            stream = self._begin_new_stream(frame.stream_id, AllowedStreamIDs.ODD)
        events = stream.state_machine.process_input(StreamInputs.RECV_HEADERS)
        cast("RequestReceived | ResponseReceived", events[0]).headers = headers
        if frame.flags & END_STREAM:
            events += stream.state_machine.process_input(StreamInputs.RECV_END_STREAM)
        return events

    def send_head(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """h2's `send_headers` for a request, or a final response, that `wire.headers` has checked.

        Where all is in order it does not go through it: that costs three times as much.
        """
        stream = self.streams.get(stream_id)
        block = self._encoder.encode(headers) if self._encoder.announced else None
        if (
            block is None  # else encoding it twice gives the same
            or len(block) > self.max_outbound_frame_size
            or not self._is_open
            or (stream is None) is not self.config.client_side
            or (stream is not None and stream.state_machine.headers_sent)
        ):
            self.send_headers(stream_id, headers, end_stream=end)
            return
        if stream is None:
            stream = self._begin_new_stream(stream_id, AllowedStreamIDs.ODD)
        stream.state_machine.process_input(StreamInputs.SEND_HEADERS)
        if end:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        if self.config.client_side:
            stream.request_method = value_of(headers, b":method")  # answers to HEAD have no body
        flags = END_HEADERS | END_STREAM if end else END_HEADERS
        self._data_to_send += head_of(HEADERS, flags, stream_id, len(block)) + block

    def send_body(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """h2's `send_data`; where all is in order, without going through it."""
        stream = self.streams[stream_id]
        in_order = stream.state_machine.state in _SENDING and self._is_open
        fits = len(data) <= min(self.send_room(stream_id), self.max_outbound_frame_size)
        if not (in_order and fits):
            self.send_data(stream_id, data, end_stream=end)
            return
        stream.outbound_flow_control_window -= len(data)
        self.outbound_flow_control_window -= len(data)
        if end:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        self._queue(stream_id, END_STREAM if end else 0, data)

    def acknowledge_received_data(self, acknowledged_size: int, stream_id: int) -> None:
        """As h2 does it; nearly always this only adds up, and sends nothing."""
        self._credit(0, self._inbound_flow_control_window_manager, acknowledged_size)
        stream = self.streams.get(stream_id)
        if stream is not None and stream.open:
            self._credit(stream_id, stream._inbound_window_manager, acknowledged_size)

    def _credit(self, stream_id: int, window: WindowManager, size_bytes: int) -> None:
        if increment := window.process_bytes(size_bytes):
            frame = WindowUpdateFrame(stream_id)
            frame.window_increment = increment
            self._prepare_for_sending([frame])

    def data_to_send(self, amount: int | None = None) -> bytes:
        """All of it, however much was asked for."""
        return b"".join(self.parts_to_send())

    def parts_to_send(self) -> list[bytes | bytearray | memoryview]:
        """The same in pieces, none of them empty."""
        if not (self._queued or self._data_to_send):
            return []
        parts = self._queued
        if self._data_to_send:
            parts.append(self._data_to_send)
        self._queued, self._queued_bytes, self._data_to_send = [], 0, bytearray()
        return parts

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        """As h2 does it, but bodies, which never have padding here, are not copied on the way."""
        for frame in frames:
            if isinstance(frame, DataFrame):
                flags = END_STREAM if "END_STREAM" in frame.flags else 0
                self._queue(frame.stream_id, flags, frame.data)
            else:
                self._data_to_send += frame.serialize()

    def _queue(self, stream_id: int, flags: int, body: bytes | memoryview) -> None:
        """A DATA frame behind what waits: large bodies as they are, to be joined when they go."""
        self._data_to_send += head_of(DATA, flags, stream_id, len(body))
        if len(body) < _LARGE_BODY_BYTES:
            self._data_to_send += body
        else:
            self._queued += (self._data_to_send, body)
            self._queued_bytes += len(self._data_to_send) + len(body)
            self._data_to_send = bytearray()

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        if "PRIORITY" in frame.flags:  # deprecated; we only refuse what RFC 7540 forbids
            if frame.depends_on == frame.stream_id:
                raise ProtocolError("A stream may not depend on itself.")
            frame.flags.discard("PRIORITY")
        return super()._receive_headers_frame(frame)

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        # h2 keeps a deque for every setting it does not know, and there are 65,536 of them.
        frame.settings = {k: v for k, v in frame.settings.items() if k in _KNOWN_SETTINGS}
        return super()._receive_settings_frame(frame)

    def _local_settings_acked(self) -> dict[SettingCodes | int, ChangedSetting]:
        changes = super()._local_settings_acked()
        # Not seen as a change, since it was our initial value; before the acknowledgement the
        # peer may rightly use the default table of 4,096 bytes.
        self.decoder.max_allowed_table_size = self.local_settings.header_table_size
        return changes

    def _handle_data_on_closed_stream(
        self, events: list[Event], exc: StreamClosedError, frame: DataFrame
    ) -> tuple[list[Frame], list[Event]]:
        ours = self._stream_closed_by(frame.stream_id) is StreamClosedBy.SEND_RST_STREAM
        frames, all_events = super()._handle_data_on_closed_stream(events, exc, frame)
        if ours and not exc._events:  # it was under way when our RST_STREAM left
            frames = [f for f in frames if not isinstance(f, RstStreamFrame)]
        return frames, all_events


def settings_of(limits: Limits) -> dict[SettingCodes, int]:
    """What we advertise under these limits."""
    return {
        SettingCodes.HEADER_TABLE_SIZE: 0,
        SettingCodes.ENABLE_PUSH: 0,
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_streams,
        SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        SettingCodes.MAX_FRAME_SIZE: limits.max_frame_bytes,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
