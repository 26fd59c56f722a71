"""What a hostile or broken peer can try, and that it costs it this one connection only."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import h2.events
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from asyncgrpo_agent.errors import PeerProtocolError
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH
from asyncgrpo_agent.wire.session import (
    DataReceived,
    Event,
    Session,
    SessionClosed,
    StreamOpened,
)
from fakes.sessions import client_start, frames, joined, raw_client, raw_server, request

CANCEL = 8
GOAWAY = 7
ENHANCE_YOUR_CALM = 11
FRAME_SIZE_ERROR = 6


def goodbye_code(session: Session) -> int:
    """The code of the GOAWAY that is the last frame of the output."""
    data = session.take_output()
    while True:
        end = 9 + int.from_bytes(data[:3], "big")
        if end == len(data):
            break
        data = data[end:]
    assert data[3] == GOAWAY
    return int.from_bytes(data[13:17], "big")


def breach(events: list[Event]) -> str:
    """The reason of the one SessionClosed, which is last and blames the peer."""
    closed = events[-1]
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, PeerProtocolError)
    assert sum(isinstance(e, SessionClosed) for e in events) == 1
    return closed.reason


def frames_until_breach(session: Session, frame: bytes, most: int, *, at: float = 0.0) -> int:
    """How many of one frame the session takes in."""
    for count in range(most):
        if any(isinstance(e, SessionClosed) for e in session.receive(frame, at)):
            assert goodbye_code(session) == ENHANCE_YOUR_CALM
            return count
        session.take_output()
    return most


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 9, 4096])
def test_an_oversized_frame_is_refused_at_its_header(chunk_bytes: int) -> None:
    session = raw_server(PRE_AUTH)
    hostile = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1 << 16)
    taken = 0
    for start in range(0, len(hostile), chunk_bytes):
        chunk = hostile[start : start + chunk_bytes]
        taken += len(chunk)
        if events := session.receive(chunk, 0.0):
            break
    assert "16777215" in breach(events)
    assert taken <= 9 + chunk_bytes
    assert goodbye_code(session) == FRAME_SIZE_ERROR


def test_pre_auth_frames_are_small_and_grow_after_registration() -> None:
    limit = PRE_AUTH.max_frame_bytes
    session = raw_server(PRE_AUTH)
    session.receive(request(1), 0.0)
    assert session.receive(frames(DataFrame(1, bytes(limit))), 0.0)
    breach(session.receive(frames(DataFrame(1, bytes(limit + 1))), 0.0))
    session = raw_server(PRE_AUTH)
    session.raise_limits(AUTHENTICATED)
    session.receive(request(1), 0.0)
    session.receive(frames(SettingsFrame(0, flags=["ACK"]), SettingsFrame(0, flags=["ACK"])), 0.0)
    (event,) = session.receive(frames(DataFrame(1, bytes(64 << 10))), 0.0)
    assert isinstance(event, DataReceived)


def test_a_header_block_has_a_cap_in_bytes_whatever_its_frames() -> None:
    session = raw_server(PRE_AUTH)
    assert session.receive(request(1, end_headers=False), 0.0) == []
    piece = frames(ContinuationFrame(1, bytes(4 << 10)))
    assert [session.receive(piece, 0.0) for _ in range(3)] == [[], [], []]
    breach(session.receive(piece[:9], 0.0))


def test_empty_continuations_come_to_an_end() -> None:
    session = raw_server()
    session.receive(request(1, end_headers=False), 0.0)
    events: list[Event] = []
    for _ in range(100):
        events += session.receive(frames(ContinuationFrame(1, b"")), 0.0)
    breach(events)


def test_header_fields_are_counted_while_they_are_decoded() -> None:
    session = raw_server()
    headers = (*ROLLOUT_REQUEST, *((b"x", b"1"),) * 60)
    assert session.receive(request(1, headers), 0.0) == [StreamOpened(1, headers)]
    breach(session.receive(request(3, (*headers, (b"x", b"2"))), 0.0))


def test_a_decoded_header_list_has_a_cap() -> None:
    session = raw_server()
    value = bytes(b"v" * 1000)
    headers = (*ROLLOUT_REQUEST, *((b"name-%d" % i, value) for i in range(16)))
    breach(session.receive(request(1, headers), 0.0))


def test_unknown_settings_are_not_kept_and_long_ones_refused() -> None:
    session = raw_server()
    odd = SettingsFrame(0)
    odd.settings = dict.fromkeys(range(100, 120), 1)
    session.receive(frames(odd), 0.0)
    assert not set(session._h2.remote_settings) & set(odd.settings)
    odd.settings = dict.fromkeys(range(100, 140), 1)
    breach(session.receive(frames(odd), 0.0))


def test_two_hundred_hostile_connections_hold_little_memory() -> None:
    sessions = [raw_server(PRE_AUTH) for _ in range(200)]
    partial = frames(DataFrame(1, bytes(16 << 10)))[:-1]
    tracemalloc.start()
    for session in sessions:
        session.receive(request(1) + partial, 0.0)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 200 * (32 << 10)


# --- the beginning ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01",
        client_start()[:24] + frames(PingFrame(0, b"12345678")),
        client_start()[:24] + frames(SettingsFrame(0, flags=["ACK"])),
    ],
)
def test_a_peer_that_does_not_begin_as_http2(data: bytes) -> None:
    breach(Session(client=False, limits=PRE_AUTH, now=0.0).receive(data, 0.0))


def test_pushes_are_refused() -> None:
    session = raw_client()
    session.open_stream(ROLLOUT_REQUEST)
    breach(session.receive(frames(PushPromiseFrame(1, 2, b"", flags=["END_HEADERS"])), 0.0))


# --- rates -----------------------------------------------------------------------------------


def test_rapid_reset() -> None:
    session = raw_server(PRE_AUTH)
    pairs = 0
    while not session.closed:
        stream_id = 2 * pairs + 1
        data = request(stream_id) + frames(RstStreamFrame(stream_id, CANCEL))
        events = session.receive(data, 0.0)
        pairs += 1
    breach(events)
    assert pairs == PRE_AUTH.wasted_streams.burst + 1
    assert goodbye_code(session) == ENHANCE_YOUR_CALM


def test_a_whole_fleets_cancellations_at_once_are_no_attack() -> None:
    session = raw_server()
    ids = range(1, 2 * AUTHENTICATED.max_streams, 2)
    session.receive(b"".join(request(i) for i in ids), 0.0)
    session.receive(frames(*(RstStreamFrame(i, CANCEL) for i in ids)), 0.0)
    assert not session.closed


def test_resets_at_a_moderate_rate_are_fine() -> None:
    limits = replace(PRE_AUTH, max_streams=8)
    session = raw_server(limits)
    for number in range(500):
        stream_id = 2 * number + 1
        data = request(stream_id) + frames(RstStreamFrame(stream_id, CANCEL))
        session.receive(data, number / limits.wasted_streams.per_s)
    assert not session.closed


def test_streams_that_are_refused_or_malformed_count() -> None:
    session = raw_server(replace(PRE_AUTH, max_streams=0))
    number = 0
    while not session.closed:
        session.receive(request(2 * number + 1), 0.0)
        session.take_output()
        number += 1
    assert number == PRE_AUTH.wasted_streams.burst + 1


def test_streams_that_we_give_up_are_not_the_peers_waste() -> None:
    session = raw_server(PRE_AUTH)
    for number in range(300):  # at one instant
        stream_id = 2 * number + 1
        session.receive(request(stream_id), 0.0)
        session.reset(stream_id, CANCEL)
        session.take_output()
    assert not session.closed


def test_a_server_that_resets_everything() -> None:
    session = raw_client(PRE_AUTH)
    number = 0
    while not session.closed:
        stream_id = session.open_stream(ROLLOUT_REQUEST)
        session.receive(frames(RstStreamFrame(stream_id, CANCEL)), 0.0)
        number += 1
    assert number == PRE_AUTH.wasted_streams.burst + 1


FLOODS: dict[str, Frame] = {
    "PING": PingFrame(0, b"12345678"),
    "SETTINGS": SettingsFrame(0),
    "SETTINGS ack": SettingsFrame(0, flags=["ACK"]),
    "empty DATA": DataFrame(1),
    "one byte of DATA": DataFrame(1, b"x"),
    "PRIORITY": PriorityFrame(1, depends_on=3),
    "WINDOW_UPDATE": WindowUpdateFrame(0, 1),
    "WINDOW_UPDATE of a stream": WindowUpdateFrame(1, 1),
    "unknown": ExtensionFrame(0xFA, 0),
    "RST_STREAM of nothing": RstStreamFrame(5, CANCEL),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_are_cut_off(flood: str) -> None:
    session = raw_server(PRE_AUTH)
    session.receive(request(1), 0.0)
    taken = frames_until_breach(session, FLOODS[flood].serialize(), 1000)
    bursts = (PRE_AUTH.control_frames.burst, PRE_AUTH.idle_frames.burst)
    assert min(bursts) - 2 <= taken <= max(bursts) + 10


@pytest.mark.parametrize("flood", FLOODS)
def test_the_same_frames_at_a_low_rate_are_fine(flood: str) -> None:
    session = raw_server()
    session.receive(request(1), 0.0)
    frame = FLOODS[flood].serialize()
    for number in range(1, 1000):
        session.receive(frame, number * 0.2)
        session.take_output()
    assert not session.closed


def test_answers_that_nobody_reads_do_not_pile_up() -> None:
    session = raw_server(PRE_AUTH)
    ping = frames(PingFrame(0, b"12345678"))
    now = 0.0
    while not session.closed:
        now += 1.0
        events = session.receive(ping, now)
    assert "does not read" in breach(events)
    assert len(session.take_output()) < PRE_AUTH.max_control_bytes + 200


def test_a_window_update_for_each_request_is_ordinary_traffic() -> None:
    session = raw_client(PRE_AUTH)
    for _ in range(1000):  # all at the same instant: no bucket is refilled by time
        stream_id = session.open_stream(ROLLOUT_REQUEST)
        session.send(stream_id, b"x" * 1500)
        session.end(stream_id)
        session.take_output()
        answer = request(stream_id, OK_RESPONSE) + frames(
            WindowUpdateFrame(0, 1500),
            WindowUpdateFrame(stream_id, 1500),
            DataFrame(stream_id, b"ok", flags=["END_STREAM"]),
        )
        session.receive(answer, 0.0)
    assert not session.closed


def test_ordinary_requests_never_trip_a_budget() -> None:
    pair = joined(PRE_AUTH)
    for _ in range(2000):  # at one instant, under the tightest limits
        stream_id = pair.client.open_stream(ROLLOUT_REQUEST, end=True)
        pair.to_server()
        pair.server.respond(stream_id, OK_RESPONSE, end=True)
        pair.to_client()
    assert not pair.client.closed
    assert not pair.server.closed
    assert pair.client.open_streams == pair.server.open_streams == 0


# --- windows ---------------------------------------------------------------------------------


def test_more_than_the_window_is_refused() -> None:
    session = raw_server(replace(AUTHENTICATED, stream_window_bytes=1000))
    session.receive(request(1), 0.0)
    breach(session.receive(frames(DataFrame(1, bytes(1001))), 0.0))


def upload_and_cancel(number: int, *, server_resets: bool) -> None:
    """`number` uploads of 10 KB, each cancelled before or after its bytes were taken."""
    pair = joined()
    for index in range(number):
        pair.now += 0.01
        stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
        pair.client.send(stream_id, bytes(10_000))
        if server_resets and index % 2:  # the bytes arrive on a stream that is gone
            head = pair.client.take_output()
            pair.server.receive(head[: 9 + head[2]], pair.now)
            pair.server.reset(stream_id, CANCEL)
            pair.server.receive(head[9 + head[2] :], pair.now)
        else:
            pair.to_server()
            pair.client.reset(stream_id, CANCEL)
            pair.to_server()
        for event in pair.take_server_events():
            if isinstance(event, DataReceived):
                pair.server.acknowledge(stream_id, event.flow_bytes)
        pair.to_client()
    # Updates go out at half a window, so at least half of it must be open.
    for _ in range(4):
        stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
        pair.client.send(stream_id, bytes(1 << 20))
    pair.exchange()
    sent = sum(len(e.data) for e in pair.take_server_events() if isinstance(e, DataReceived))
    assert sent == 4 << 20
    assert not pair.server.closed


@pytest.mark.parametrize("server_resets", [False, True])
def test_a_thousand_cancelled_uploads_leave_the_window_whole(server_resets: bool) -> None:
    upload_and_cancel(1000, server_resets=server_resets)


@pytest.mark.slow
def test_ten_thousand_cancelled_uploads_leave_the_window_whole() -> None:
    upload_and_cancel(10_000, server_resets=True)


def test_padding_and_bytes_for_unknown_streams_are_credited() -> None:
    session = raw_server(replace(AUTHENTICATED, connection_window_bytes=1 << 16))
    session.receive(request(1), 0.0)
    session.reset(1, CANCEL)
    padded = frames(DataFrame(1, b"x" * 100, flags=["PADDED"], pad_length=255))
    for _ in range(2000):  # 356 bytes each, ten times the window
        session.receive(padded, 0.0)
        session.take_output()
    assert not session.closed


# --- the codec -------------------------------------------------------------------------------


def break_codec(session: Session) -> None:
    """Make h2 trip over its own feet."""

    def receive_data(data: object) -> list[h2.events.Event]:
        raise KeyError(42)

    session._h2.receive_data = receive_data  # type: ignore[method-assign]


def test_an_unexpected_error_of_the_codec_ends_this_connection_only() -> None:
    session = Session(client=False, limits=PRE_AUTH, now=0.0)
    break_codec(session)
    assert "KeyError" in breach(session.receive(client_start(), 0.0))
    assert goodbye_code(session) == 2
    strict = Session(client=False, limits=PRE_AUTH, now=0.0, strict_codec=True)
    break_codec(strict)
    with pytest.raises(KeyError):
        strict.receive(client_start(), 0.0)
