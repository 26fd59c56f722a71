"""h2's connection, made fast and mild. The only module that reaches into h2 and hpack.

What differs from a plain H2Connection, and why:

* The settings we want are in the very first SETTINGS frame, and h2's derived attributes agree.
* HPACK is stateless: the encoder never indexes and never uses Huffman codes, so an encoded block
  depends on its headers alone and is memoised; we advertise a table of size 0, and once the peer
  has acknowledged that, decoded blocks are memoised by their bytes.
* Header validation stays on. What is memoised is the outcome of blocks that passed it. Outbound
  lists are checked by `wire.headers` instead of by h2.
* Open streams are counted in O(1): finished streams are released at once, so the length of h2's
  table is the count (h2 walks the table for each new stream).
* A malformed message is a fault of its stream, not of the connection. Data that arrives late on a
  stream that we reset is credited silently, without another RST_STREAM for each frame.
* Streams above our limit are not refused here: h2 would end the connection. The session does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar, cast

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, StreamReset
from h2.exceptions import (
    InvalidBodyLengthError,
    ProtocolError,
    StreamClosedError,
    StreamIDTooLowError,
)
from h2.settings import ChangedSetting, SettingCodes, Settings
from h2.stream import H2Stream, StreamClosedBy, StreamState
from h2.utilities import HeaderValidationFlags
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.hpack import Decoder, Encoder
from hpack.struct import Header, HeaderTuple
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame, SettingsFrame

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
from asyncgrpo_agent.wire.headers import Headers
from asyncgrpo_agent.wire.limits import Limits

K = TypeVar("K")
V = TypeVar("V")
ValidatedMemo = dict[tuple[tuple[Header, ...], HeaderValidationFlags], list[Header]]

_MEMO_ENTRIES: Final = 256  # per connection and kind; agents use about five
_MEMO_BLOCK_BYTES: Final = 1 << 10  # larger blocks are not worth keeping
_TABLE_SIZE_ZERO: Final = b"\x20"  # HPACK: "my dynamic table has size 0"
_KNOWN_SETTINGS: Final = frozenset(SettingCodes)


class CompressionError(ProtocolError):
    """A header block that does not decode. h2 would call it a PROTOCOL_ERROR."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class StatelessEncoder(Encoder):
    """Literals only, never Huffman. Announces its empty table once, then needs no state."""

    def __init__(self) -> None:
        super().__init__()
        self._memo: dict[Headers, bytes] = {}
        self._announced = False

    @property
    def header_table_size(self) -> int:
        return 0

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        """The peer's table may have any size: an encoder may always use less of it."""

    def encode(self, headers: Iterable[tuple[bytes, bytes]], huffman: bool = True) -> bytes:  # type: ignore[override]
        key = tuple(headers)
        block = self._memo.get(key)
        if block is None:
            block = b"".join(self.add(header, sensitive=True) for header in key)
            _remember(self._memo, key, block, len(block))
        if self._announced:
            return block
        self._announced = True
        return _TABLE_SIZE_ZERO + block


class MemoDecoder(Decoder):
    """hpack's decoder with a cap on fields, and a memory for blocks that need no state."""

    def __init__(self, *, max_list_bytes: int, max_fields: int) -> None:
        super().__init__(max_header_list_size=max_list_bytes)
        self.max_fields = max_fields
        self._fields = 0
        self._memo: dict[bytes, tuple[HeaderTuple, ...]] = {}

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        # With a table of size 0, now and for good, the same bytes give the same headers.
        stateless = self.header_table_size == 0 and self.max_allowed_table_size == 0
        if stateless and (known := self._memo.get(data)) is not None:
            return known
        self._fields = 0
        try:
            headers = tuple(super().decode(data, raw=raw))
        except OversizedHeaderListError:
            raise
        except HPACKError as error:
            raise CompressionError(f"header block: {error}") from error
        if stateless:
            _remember(self._memo, data, headers, len(data))
        return headers

    def _decode_indexed(self, data: bytes | memoryview) -> tuple[HeaderTuple, int]:
        self._count_field()
        return super()._decode_indexed(data)

    def _decode_literal(
        self, data: bytes | memoryview, should_index: bool
    ) -> tuple[HeaderTuple, int]:
        self._count_field()
        return super()._decode_literal(data, should_index)

    def _count_field(self) -> None:
        self._fields += 1
        if self._fields > self.max_fields:
            raise OversizedHeaderListError(f"more than {self.max_fields} header fields")


class Stream(H2Stream):
    """h2's stream with memoised validation; a malformed message ends it and nothing else."""

    def __init__(
        self,
        stream_id: int,
        *,
        config: H2Configuration,
        inbound_window_size: int,
        outbound_window_size: int,
        memo: ValidatedMemo,
    ) -> None:
        super().__init__(stream_id, config, inbound_window_size, outbound_window_size)
        self._memo = memo

    def receive_headers(
        self, headers: Iterable[Header], end_stream: bool, header_encoding: bool | str | None
    ) -> tuple[list[Frame], list[Event]]:
        try:
            received = super().receive_headers(headers, end_stream, header_encoding)
        except StreamClosedError:
            raise
        except ProtocolError as error:
            raise self._fault() from error
        # h2 compares only where DATA ends a body. Answers to HEAD have a length and no body.
        if end_stream and not self.config.client_side:
            expected = self._expected_content_length
            if expected is not None and expected != self._actual_content_length:
                raise self._fault()
        return received

    def receive_data(
        self, data: bytes, end_stream: bool, flow_control_len: int
    ) -> tuple[list[Frame], list[Event]]:
        try:
            return super().receive_data(data, end_stream, flow_control_len)
        except InvalidBodyLengthError as error:
            raise self._fault() from error

    def _initialize_content_length(self, headers: Iterable[Header]) -> None:
        if self._expected_content_length is None:  # trailers do not take a length back
            super()._initialize_content_length(headers)

    def _fault(self) -> StreamClosedError:
        """h2's own way (`reset_stream_on_error`) to end one stream and keep the connection."""
        self.state_machine.state = StreamState.CLOSED
        self.state_machine.stream_closed_by = StreamClosedBy.SEND_RST_STREAM
        error = StreamClosedError(self.stream_id)
        error.error_code = ErrorCodes.PROTOCOL_ERROR
        error._events = [
            StreamReset(stream_id=self.stream_id, error_code=error.error_code, remote_reset=False)
        ]
        return error

    def _process_received_headers(
        self,
        headers: Iterable[Header],
        header_validation_flags: HeaderValidationFlags,
        header_encoding: bool | str | None,
    ) -> list[Header]:
        key = (tuple(headers), header_validation_flags)
        checked = self._memo.get(key)
        if checked is None:
            pairs = super()._process_received_headers(
                headers, header_validation_flags, header_encoding
            )
            # h2 only hands it on; as a tuple of pairs it is what our events carry.
            checked = cast("list[Header]", tuple((name, value) for name, value in pairs))
            _remember(self._memo, key, checked, sum(len(n) + len(v) for n, v in checked))
        return checked


class PlainData(DataFrame):
    """With a short name: h2 formats every frame for its log, whole bodies as hexadecimal."""

    def __repr__(self) -> str:
        return "DATA"


class PlainHeaders(HeadersFrame):
    """The same for HEADERS."""

    def __repr__(self) -> str:
        return "HEADERS"


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
        self._frame_dispatch_table[PlainData] = self._receive_data_frame
        self._frame_dispatch_table[PlainHeaders] = self._receive_headers_frame
        self.encoder = StatelessEncoder()
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
        return len(self._data_to_send)

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
        plain = _plain(frame)
        if plain is None:
            return self.receive_data(frame.raw)
        try:
            return self._receive_frame(plain)
        except ProtocolError as error:  # as in h2's `receive_data`
            self._terminate_connection(error.error_code)
            raise

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        """As h2 does it, but bodies, which never have padding here, are copied once."""
        for frame in frames:
            if isinstance(frame, DataFrame):
                flags = END_STREAM if "END_STREAM" in frame.flags else 0
                self._data_to_send += head_of(DATA, flags, frame.stream_id, len(frame.data))
                self._data_to_send += frame.data
            else:
                self._data_to_send += frame.serialize()

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


def _plain(frame: WholeFrame) -> PlainData | PlainHeaders | None:
    """The frame for h2, if it has only a body: no padding, no priority, nothing to follow."""
    plain: PlainData | PlainHeaders
    if frame.stream_id and frame.kind == DATA and not frame.flags & PADDED:
        plain = PlainData(frame.stream_id, frame.body)
    elif frame.stream_id and frame.kind == HEADERS and frame.flags & ~END_STREAM == END_HEADERS:
        plain = PlainHeaders(frame.stream_id, frame.body)
        plain.flags.add("END_HEADERS")
    else:
        return None
    if frame.flags & END_STREAM:
        plain.flags.add("END_STREAM")
    return plain


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


def _remember(memo: dict[K, V], key: K, value: V, size_bytes: int) -> None:
    """Keep a small value; start over when there are too many, so that memory stays bounded."""
    if size_bytes <= _MEMO_BLOCK_BYTES:
        if len(memo) >= _MEMO_ENTRIES:
            memo.clear()
        memo[key] = value
