"""What is changed in h2, so that another h2 version that undoes it is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from hpack.hpack import Decoder, Encoder
from hyperframe.frame import HeadersFrame, RstStreamFrame, SettingsFrame

from asyncgrpo_agent.wire.connection import Connection, MemoDecoder, StatelessEncoder
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST, Headers
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.sessions import frames, request

ODD: Headers = ((b":status", b"200"), (b"x-a", b"1"), (b"cookie", b"a=b"), (b"x-b", b"v" * 300))


def server() -> Connection:
    connection = Connection(client=False, limits=AUTHENTICATED)
    connection.receive_data(frames(SettingsFrame(0)))
    connection.data_to_send()
    return connection


# --- HPACK -----------------------------------------------------------------------------------


def test_our_blocks_decode_anywhere_and_repeat_exactly() -> None:
    encoder, decoder = StatelessEncoder(), Decoder()
    first = encoder.encode(ODD)
    assert decoder.decode(first, raw=True) == list(ODD)
    assert decoder.header_table_size == 0
    second = encoder.encode(ODD)
    assert first == b"\x20" + second
    assert encoder.encode(list(ODD)) is second
    assert decoder.decode(second, raw=True) == list(ODD)
    assert not encoder.header_table.dynamic_entries


def test_the_peers_table_size_does_not_matter() -> None:
    encoder = StatelessEncoder()
    encoder.encode(ODD)
    before = encoder.encode(ODD)
    encoder.header_table_size = 1 << 20
    assert encoder.encode(ODD) == before


def test_the_memory_of_encoded_blocks_is_bounded() -> None:
    encoder = StatelessEncoder()
    for number in range(2000):
        encoder.encode(((b"x", b"%d" % number),))
        encoder.encode(((b"x", b"%d" % number * 2000),))
    assert len(encoder._memo) <= 256


def test_decoded_blocks_are_remembered_only_without_a_table() -> None:
    decoder, peer = MemoDecoder(max_list_bytes=4096, max_fields=64), Encoder()
    first = peer.encode(ODD)
    indexed = peer.encode(ODD)
    assert tuple(decoder.decode(first, raw=True)) == ODD
    assert tuple(decoder.decode(indexed, raw=True)) == ODD  # refers to the dynamic table
    assert not decoder._memo
    decoder.max_allowed_table_size = 0
    peer.header_table_size = 0
    assert tuple(decoder.decode(peer.encode(ODD), raw=True)) == ODD  # shrinks the table
    assert not decoder._memo
    stateless = peer.encode(ODD)
    remembered = decoder.decode(stateless, raw=True)
    assert decoder.decode(stateless, raw=True) is remembered
    for number in range(1000):
        decoder.decode(peer.encode(((b"x", b"%d" % number),)), raw=True)
    assert len(decoder._memo) <= 256


def test_the_peer_may_use_its_table_until_it_acknowledges() -> None:
    connection, encoder = server(), Encoder()
    for stream_id in (1, 3):
        block = encoder.encode(ROLLOUT_REQUEST)
        frame = HeadersFrame(stream_id, data=block, flags=["END_HEADERS"])
        assert connection.receive_data(frames(frame))
    connection.receive_data(frames(SettingsFrame(0, flags=["ACK"])))
    late = HeadersFrame(5, data=encoder.encode(ROLLOUT_REQUEST), flags=["END_HEADERS"])
    with pytest.raises(ProtocolError):
        connection.receive_data(frames(late))


# --- streams ---------------------------------------------------------------------------------


def test_finished_streams_are_forgotten_at_once() -> None:
    connection = server()
    connection.receive_data(request(1, end=True) + request(3))
    assert not connection.release(1)
    connection.send_headers(1, OK_RESPONSE, end_stream=True)
    assert connection.release(1)
    assert list(connection.streams) == [3]
    assert connection.release(1)


def test_opening_streams_does_not_walk_the_open_ones() -> None:
    class Watched(dict[int, object]):
        def items(self) -> object:  # type: ignore[override]
            raise AssertionError("walked over all streams")

        __iter__ = values = items  # type: ignore[assignment]

    client = Connection(client=True, limits=AUTHENTICATED)
    watched = Watched()
    client.streams = watched  # type: ignore[assignment]
    for stream_id in range(1, 41, 2):
        client.send_headers(stream_id, ROLLOUT_REQUEST)
        client.send_data(stream_id, b"x")
    incoming = server()
    incoming.streams = Watched()  # type: ignore[assignment]
    incoming.receive_data(b"".join(request(i, end=True) for i in range(1, 41, 2)))
    with pytest.raises(AssertionError, match="walked"):  # h2 itself still does
        H2Connection.open_outbound_streams.fget(client)  # type: ignore[attr-defined]


def test_how_streams_ended_is_kept_for_a_bounded_number() -> None:
    connection = server()
    assert connection._closed_streams._size_limit == Connection.MAX_CLOSED_STREAMS  # type: ignore[attr-defined]
    connection.receive_data(request(1) + frames(RstStreamFrame(1, 8)))
    connection.release(1)
    assert 1 in connection._closed_streams


def test_a_stream_that_depends_on_itself() -> None:
    frame = HeadersFrame(
        1,
        data=StatelessEncoder().encode(ROLLOUT_REQUEST),
        depends_on=1,
        flags=["END_HEADERS", "PRIORITY"],
    )
    with pytest.raises(ProtocolError):
        server().receive_data(frames(frame))
    frame.depends_on = 3
    assert len(server().receive_data(frames(frame))) == 1


# --- settings --------------------------------------------------------------------------------


def test_raised_limits_hold_once_they_are_acknowledged() -> None:
    connection = server()
    larger = replace(
        AUTHENTICATED, max_frame_bytes=1 << 18, max_header_bytes=1 << 15, max_header_fields=99
    )
    connection.raise_limits(AUTHENTICATED, larger)
    assert connection.max_inbound_frame_size == AUTHENTICATED.max_frame_bytes
    connection.receive_data(frames(SettingsFrame(0, flags=["ACK"])))
    assert connection.max_inbound_frame_size == 1 << 18
    assert connection.decoder.max_header_list_size == 1 << 15
    before = connection.pending_bytes
    connection.raise_limits(larger, larger)
    assert connection.pending_bytes == before
