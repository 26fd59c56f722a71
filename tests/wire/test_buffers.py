"""Send buffers: order, marks, turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.wire.buffers import Outbox, SendBuffer


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(0, 80)))
def test_what_goes_in_comes_out_in_order(chunks: list[bytes], pulls: list[int]) -> None:
    buffer = SendBuffer()
    for chunk in chunks:
        buffer.push(chunk)
    whole, got = b"".join(chunks), b""
    for size in pulls:
        piece = buffer.pull(size)
        assert len(piece) == min(size, len(whole) - len(got))
        got += piece
        assert buffer.size_bytes == len(whole) - len(got)
    assert got + buffer.pull(1 << 20) == whole
    assert buffer.size_bytes == 0


def test_a_whole_chunk_is_not_copied() -> None:
    buffer, chunk = SendBuffer(), b"x" * 1000
    buffer.push(chunk)
    assert buffer.pull(5000) is chunk


def test_turns_go_round() -> None:
    outbox = Outbox(high_bytes=10, low_bytes=2)
    for stream_id in (1, 3, 5):
        outbox.add(stream_id)
        outbox.push(stream_id, b"xx")
    order = []
    for _ in range(6):
        turn = outbox.next_turn()
        assert turn is not None
        order.append(turn[0])
        turn[1].pull(1)
        outbox.wake(turn[0])
    assert order == [1, 3, 5, 1, 3, 5]
    assert outbox.next_turn() is None


def test_a_stream_has_one_place_in_the_round() -> None:
    outbox = Outbox(high_bytes=10, low_bytes=2)
    outbox.add(1)
    outbox.push(1, b"a")
    outbox.push(1, b"b")
    outbox.wake(1)
    assert outbox.waiting == 1


def test_dropped_streams_lose_their_turn() -> None:
    outbox = Outbox(high_bytes=10, low_bytes=2)
    for stream_id in (1, 3):
        outbox.add(stream_id)
        outbox.push(stream_id, b"x")
    outbox.drop(1)
    outbox.drop(1)
    turn = outbox.next_turn()
    assert turn is not None
    assert turn[0] == 3
    assert 1 not in outbox
    outbox.push(1, b"late")
    assert outbox.next_turn() is None


def test_marks() -> None:
    outbox = Outbox(high_bytes=10, low_bytes=2)
    outbox.add(1)
    buffer = outbox.get(1)
    assert buffer is not None
    outbox.push(1, b"123456789")
    assert outbox.writable(1)
    outbox.push(1, b"0")
    assert not outbox.writable(1)
    buffer.pull(7)
    assert outbox.writable(1)
    assert not outbox.relieved(buffer)
    buffer.pull(1)
    assert outbox.relieved(buffer)
    assert not outbox.relieved(buffer)
