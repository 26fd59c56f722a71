"""The frame guard: what is cut out of a stream, and what is refused how early."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.wire.frames import PREFACE, Breach, Frame, FrameSplitter
from fakes.sessions import frames

STREAM = frames(
    SettingsFrame(0),
    DataFrame(1, b"body"),
    HeadersFrame(3, data=b"abc"),
    ContinuationFrame(3, b"def", flags=["END_HEADERS"]),
    DataFrame(1, b"", flags=["END_STREAM"]),
)


def splitter(*, preface: bool = False, block: int = 100) -> FrameSplitter:
    return FrameSplitter(preface=preface, max_frame_bytes=1000, max_header_bytes=block)


def drain(source: FrameSplitter, data: bytes) -> list[Frame]:
    source.feed(data)
    found = []
    while (frame := source.next_frame()) is not None:
        found.append(frame)
    return found


def test_frames_keep_their_fields_and_bytes() -> None:
    found = drain(splitter(), STREAM)
    assert [(f.kind, f.flags, f.stream_id, f.length) for f in found] == [
        (4, 0, 0, 0),
        (0, 0, 1, 4),
        (1, 0, 3, 3),
        (9, 4, 3, 3),
        (0, 1, 1, 0),
    ]
    assert b"".join(f.raw for f in found) == STREAM


@given(st.lists(st.integers(1, len(PREFACE + STREAM)), max_size=30))
def test_chunking_does_not_matter(cuts: list[int]) -> None:
    source, data, found = splitter(preface=True), PREFACE + STREAM, []
    edges = [0, *sorted(set(cuts)), len(data)]
    for start, end in pairwise(edges):
        found += drain(source, data[start:end])
    assert b"".join(f.raw for f in found) == STREAM
    assert source.held_bytes == 0


def test_a_wrong_preface_is_seen_at_its_first_wrong_byte() -> None:
    source = splitter(preface=True)
    assert drain(source, PREFACE[:10]) == []
    with pytest.raises(Breach):
        drain(source, b"!")


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    raw = bytearray(frames(SettingsFrame(0), DataFrame(7, b"x")))
    raw[9 + 5] |= 0x80
    assert drain(splitter(), bytes(raw))[1].stream_id == 7


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\x03\xe9\x04\x00\x00\x00\x00\x00",  # SETTINGS of 1001 bytes
        b"\x00\x00\xc6\x04\x00\x00\x00\x00\x00",  # 33 settings
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x00",  # a PING first
        b"\x00\x00\x00\x04\x01\x00\x00\x00\x00",  # an acknowledgement first
    ],
)
def test_refused_by_the_header_alone(head: bytes) -> None:
    source = splitter()
    assert drain(source, head[:8]) == []
    with pytest.raises(Breach):
        drain(source, head[8:])


def test_header_blocks_are_capped_together() -> None:
    source = splitter(block=100)
    drain(source, frames(SettingsFrame(0), HeadersFrame(1, data=bytes(60))))
    assert source.block_open
    drain(source, frames(ContinuationFrame(1, bytes(40), flags=["END_HEADERS"])))
    assert not source.block_open
    drain(source, frames(HeadersFrame(3, data=bytes(100))))  # the next block starts at zero
    with pytest.raises(Breach):
        drain(source, frames(ContinuationFrame(3, b"x"))[:9])


def test_nothing_comes_between_the_parts_of_a_block() -> None:
    source = splitter()
    drain(source, frames(SettingsFrame(0), HeadersFrame(1, data=b"x")))
    with pytest.raises(Breach):
        drain(source, frames(PingFrame(0, b"12345678")))
