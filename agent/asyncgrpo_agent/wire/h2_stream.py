"""h2's stream and frames as `wire.connection` uses them.

A malformed message ends its stream and nothing else, and validation is memoised: what is remembered
is the outcome of blocks that passed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import Event, StreamReset
from h2.exceptions import InvalidBodyLengthError, ProtocolError, StreamClosedError
from h2.stream import H2Stream, StreamClosedBy, StreamState
from h2.utilities import HeaderValidationFlags
from hpack.struct import Header
from hyperframe.frame import DataFrame, Frame, HeadersFrame

from asyncgrpo_agent.wire.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PADDED
from asyncgrpo_agent.wire.frames import Frame as WholeFrame
from asyncgrpo_agent.wire.hpack_codec import remember

ValidatedMemo = dict[tuple[tuple[Header, ...], HeaderValidationFlags], list[Header]]


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
            remember(self._memo, key, checked, sum(len(n) + len(v) for n, v in checked))
        return checked


class PlainData(DataFrame):
    """With a short name: h2 formats every frame for its log, whole bodies as hexadecimal."""

    def __repr__(self) -> str:
        return "DATA"


class PlainHeaders(HeadersFrame):
    """The same for HEADERS."""

    def __repr__(self) -> str:
        return "HEADERS"


def plain_frame(whole: WholeFrame) -> PlainData | PlainHeaders | None:
    """The frame for h2, if it has only a body: no padding, no priority, nothing to follow."""
    frame: PlainData | PlainHeaders
    if whole.stream_id and whole.kind == DATA and not whole.flags & PADDED:
        frame = PlainData(whole.stream_id, bytes(whole.body))
    elif whole.stream_id and whole.kind == HEADERS and whole.flags & ~END_STREAM == END_HEADERS:
        frame = PlainHeaders(whole.stream_id, bytes(whole.body))
        frame.flags.add("END_HEADERS")
    else:
        return None
    if whole.flags & END_STREAM:
        frame.flags.add("END_STREAM")
    return frame
