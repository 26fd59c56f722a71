"""The frame guard: what is cut out of a stream, and what is refused how early."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.wire.frames import PING, PREFACE, Breach, Frame, FrameSplitter
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


def drain(source: FrameSplitter, data: bytes | bytearray) -> list[Frame]:
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


@pytest.mark.parametrize(
    ("held_bytes", "kind"), [(0, None), (1, -1), (3, -1), (4, PING), (9, PING), (16, PING)]
)
def test_what_has_begun(held_bytes: int, kind: int | None) -> None:
    source = splitter()
    drain(source, frames(SettingsFrame(0), PingFrame(0, bytes(8)))[: 9 + held_bytes])
    assert source.begun == kind
    drain(source, frames(PingFrame(0, bytes(8)))[held_bytes:])
    assert source.begun is None


def test_nothing_comes_between_the_parts_of_a_block() -> None:
    source = splitter()
    drain(source, frames(SettingsFrame(0), HeadersFrame(1, data=b"x")))
    with pytest.raises(Breach):
        drain(source, frames(PingFrame(0, b"12345678")))


# --- large bodies ----------------------------------------------------------------------------

LARGE = bytes(range(256)) * 512
LARGE_FRAME = frames(DataFrame(1, LARGE))


def begun_splitter() -> FrameSplitter:
    source = FrameSplitter(preface=False, max_frame_bytes=1 << 20, max_header_bytes=100)
    drain(source, frames(SettingsFrame(0)))
    return source


def test_a_large_body_is_a_view_of_what_was_read() -> None:
    read = bytearray(LARGE_FRAME * 2)
    found = drain(begun_splitter(), read)
    assert [frame.body for frame in found] == [LARGE, LARGE]
    assert all(isinstance(f.body, memoryview) and f.body.obj is read for f in found)


def test_a_body_that_is_small_in_what_was_read_does_not_keep_it() -> None:
    found = drain(begun_splitter(), frames(DataFrame(1, LARGE[: 64 << 10])) + LARGE_FRAME * 2)
    assert [type(frame.body) for frame in found] == [bytes, memoryview, memoryview]


@pytest.mark.parametrize("chunk_bytes", [5, 1000, 50_000, 131_080, 200_000, 300_000])
def test_views_stay_what_they_were_while_more_comes(chunk_bytes: int) -> None:
    source, found = begun_splitter(), []
    data = LARGE_FRAME + frames(DataFrame(3, b"small")) + LARGE_FRAME * 3
    for at in range(0, len(data), chunk_bytes):
        found += drain(source, data[at : at + chunk_bytes])
    assert [frame.body for frame in found] == [LARGE, b"small", LARGE, LARGE, LARGE]
    assert source.held_bytes == 0


def test_only_what_completes_a_frame_is_joined_to_it() -> None:
    source, data = begun_splitter(), LARGE_FRAME * 2
    drain(source, data[:1000])
    first, second = drain(source, rest := data[1000:])
    assert isinstance(second.body, memoryview)
    assert second.body.obj is rest
    assert first.body == LARGE


def test_what_is_fed_before_anybody_looks_stays_in_order() -> None:
    source, data = begun_splitter(), STREAM[9:] + LARGE_FRAME
    for at in range(0, len(data), 10):
        source.feed(data[at : at + 10])
    found = drain(source, STREAM[9:])
    assert b"".join(f.raw for f in found) == data + STREAM[9:]
