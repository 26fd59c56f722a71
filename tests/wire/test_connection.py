"""What is changed in h2, so that another h2 version that undoes it is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h2.connection import H2Connection
from h2.events import RequestReceived
from h2.exceptions import ProtocolError
from hpack.hpack import Decoder, Encoder
from hyperframe.frame import HeadersFrame, RstStreamFrame, SettingsFrame

from asyncgrpo_agent.wire.connection import Connection
from asyncgrpo_agent.wire.frames import PREFACE, Frame
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST, Headers
from asyncgrpo_agent.wire.hpack_codec import MemoDecoder, StatelessEncoder
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


def state_of(connection: Connection, stream_id: int) -> dict[str, object]:
    """All that h2 and we keep about a stream; objects by their state."""
    stream = connection.streams[stream_id]
    kept = {k: v for k, v in vars(stream).items() if k not in ("config", "_memo", "_authority")}
    for name in ("state_machine", "_inbound_window_manager"):
        kept[name] = vars(kept[name])
    return kept


@pytest.mark.parametrize("end", [False, True])
def test_sent_heads_are_those_of_h2(end: bool) -> None:
    ours, theirs = (Connection(client=True, limits=AUTHENTICATED) for _ in range(2))
    ours_back, theirs_back = server(), server()
    for stream_id in (1, 3):
        ours.send_head(stream_id, ROLLOUT_REQUEST, end=end)
        theirs.send_headers(stream_id, ROLLOUT_REQUEST, end_stream=end)
        assert state_of(ours, stream_id) == state_of(theirs, stream_id)
        for back in (ours_back, theirs_back):
            back.receive_data(request(stream_id, end=end))
        ours_back.send_head(stream_id, OK_RESPONSE, end=end)
        theirs_back.send_headers(stream_id, OK_RESPONSE, end_stream=end)
        assert state_of(ours_back, stream_id) == state_of(theirs_back, stream_id)
    assert ours.data_to_send() == theirs.data_to_send()
    assert ours_back.data_to_send() == theirs_back.data_to_send()


def test_a_head_too_large_for_a_frame_is_left_to_h2() -> None:
    large = (*ROLLOUT_REQUEST, (b"x", b"v" * 20_000))
    ours, theirs = (Connection(client=True, limits=AUTHENTICATED) for _ in range(2))
    for stream_id in (1, 3):
        ours.send_head(stream_id, large, end=False)
        theirs.send_headers(stream_id, large)
    assert ours.data_to_send() == theirs.data_to_send()


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("more", [(), ((b"content-length", b"0"),), ((b"content-length", b"7"),)])
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
@pytest.mark.parametrize("status", [b"103", b"200"])
def test_received_heads_mean_what_they_mean_to_h2(
    end: bool, more: Headers, method: bytes, status: bytes
) -> None:
    asked = ((b":method", method), *(h for h in ROLLOUT_REQUEST if h[0] != b":method"), *more)
    answered = ((b":status", status), *more)

    def meaning(*, fast: bool) -> list[object]:
        client, back = Connection(client=True, limits=AUTHENTICATED), server()
        # Both have acknowledged each other's settings: blocks may be remembered.
        for _ in range(2):
            client.receive_data(back.data_to_send())
            back.receive_data(client.data_to_send().removeprefix(PREFACE))
        said: list[object] = []
        for stream_id in (1, 3, 5):
            client.send_headers(stream_id, asked)
            for at, (end_, headers, to) in enumerate(((end, asked, back), (end, answered, client))):
                body = StatelessEncoder().encode(headers)
                whole = HeadersFrame(stream_id, data=body, flags=["END_HEADERS"])
                whole.flags |= {"END_STREAM"} if end_ else set()
                try:
                    if fast:
                        flags = 4 | int(end_)
                        events = to.receive_frame(Frame(1, flags, stream_id, len(body), body))
                    else:
                        events = to.receive_data(whole.serialize())
                except ProtocolError as error:
                    said.append((at, type(error)))
                    return said
                said.append([(type(e), vars(e).get("headers")) for e in events])
                said.append(state_of(to, stream_id) if stream_id in to.streams else None)
            said.append(back.highest_inbound_stream_id)
        return said

    assert meaning(fast=True) == meaning(fast=False)


def test_a_known_head_skips_h2(monkeypatch: pytest.MonkeyPatch) -> None:
    back = server()
    client = Connection(client=True, limits=AUTHENTICATED)
    back.receive_data(client.data_to_send().removeprefix(PREFACE) + frames(SettingsFrame(0)))
    back.receive_data(frames(SettingsFrame(0, flags=["ACK"])))
    block = StatelessEncoder().encode(ROLLOUT_REQUEST)
    for stream_id in (1, 3):  # with the first the peer's table goes
        back.receive_frame(Frame(1, 4, stream_id, len(block), block))
    monkeypatch.setattr(back, "_frame_dispatch_table", {})
    (event,) = back.receive_frame(Frame(1, 4, 5, len(block), block))
    assert isinstance(event, RequestReceived)
    with pytest.raises(KeyError):  # a number that is used up, for h2 to refuse
        back.receive_frame(Frame(1, 4, 1, len(block), block))


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
