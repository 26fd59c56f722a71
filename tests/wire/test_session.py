"""The life of streams and sessions between two well-behaved ends."""

from __future__ import annotations

from dataclasses import replace

import h2.connection
import h2.events
import pytest
from h2.config import H2Configuration
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE, ROLLOUT_REQUEST, Headers
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH, Limits
from asyncgrpo_agent.wire.session import (
    WORK_A_CALL,
    DataReceived,
    Event,
    PingAcked,
    ResponseStarted,
    Session,
    SessionClosed,
    SessionReady,
    SlotsFreed,
    StreamEnded,
    StreamOpened,
    StreamReset,
    StreamWritable,
)
from fakes.sessions import Pair, frames, joined, raw_client, raw_server, request
from fakes.wire_frames import GET, data, field, headers, reset

CANCEL = 8
REFUSED_STREAM = 7


def data_of(events: list[Event], stream_id: int) -> bytes:
    return b"".join(
        e.data for e in events if isinstance(e, DataReceived) and e.stream_id == stream_id
    )


def closings(events: list[Event]) -> list[SessionClosed]:
    return [e for e in events if isinstance(e, SessionClosed)]


# --- an exchange -----------------------------------------------------------------------------


def test_settings_cross_and_make_both_ready() -> None:
    pair = Pair()
    assert not pair.client.ready
    pair.exchange()
    assert pair.client_events == [SessionReady()]
    assert pair.server_events == [SessionReady()]
    assert pair.client.ready
    assert pair.server.ready


def test_a_request_and_its_answer() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.send(stream_id, b"question")
    pair.client.end(stream_id)
    pair.exchange()
    assert pair.take_server_events() == [
        StreamOpened(stream_id, ROLLOUT_REQUEST),
        DataReceived(stream_id, b"question", 8),
        StreamEnded(stream_id),
    ]
    pair.server.respond(stream_id, OK_RESPONSE)
    pair.server.send(stream_id, b"ans")
    pair.server.send(stream_id, b"wer")
    pair.server.end(stream_id)
    pair.exchange()
    assert pair.take_client_events() == [
        ResponseStarted(stream_id, OK_RESPONSE),
        DataReceived(stream_id, b"answer", 6),
        StreamEnded(stream_id),
    ]
    assert pair.client.open_streams == pair.server.open_streams == 0


def test_the_answer_may_come_before_the_request_has_ended() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(CONTROL_REQUEST)
    pair.exchange()
    pair.server.respond(stream_id, OK_RESPONSE)
    pair.server.send(stream_id, b"early")
    pair.server.end(stream_id)
    pair.exchange()
    assert pair.take_client_events()[-1] == StreamEnded(stream_id)
    pair.client.send(stream_id, b"late")
    pair.client.end(stream_id)
    pair.exchange()
    assert pair.take_server_events()[-2:] == [
        DataReceived(stream_id, b"late", 4),
        StreamEnded(stream_id),
    ]
    assert pair.client.open_streams == pair.server.open_streams == 0


def test_headers_alone_can_be_a_whole_exchange() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST, end=True)
    pair.exchange()
    assert pair.take_server_events()[-1] == StreamEnded(stream_id)
    pair.server.respond(stream_id, OK_RESPONSE, end=True)
    pair.exchange()
    assert pair.take_client_events()[-1] == StreamEnded(stream_id)
    assert pair.client.open_streams == 0


def test_a_body_larger_than_every_window_arrives_whole() -> None:
    pair = joined()
    body = bytes(range(256)) * (20 << 12)  # 20 MiB
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.send(stream_id, body)
    pair.client.end(stream_id)
    received = bytearray()
    while len(received) < len(body):
        pair.exchange()
        events = pair.take_server_events()
        received += data_of(events, stream_id)
        for event in events:
            if isinstance(event, DataReceived):
                pair.server.acknowledge(stream_id, event.flow_bytes)
    assert received == body


def test_trailers_end_a_stream_and_are_not_reported() -> None:
    session = raw_client()
    stream_id = session.open_stream(ROLLOUT_REQUEST, end=True)
    head = request(stream_id, OK_RESPONSE)
    trailers = request(stream_id, ((b"x-check", b"1"),), end=True)
    assert session.receive(head + trailers, 0.0) == [
        ResponseStarted(stream_id, OK_RESPONSE),
        StreamEnded(stream_id),
    ]


def test_informational_responses_are_passed_over() -> None:
    session = raw_client()
    stream_id = session.open_stream(ROLLOUT_REQUEST, end=True)
    data = request(stream_id, ((b":status", b"103"),)) + request(stream_id, OK_RESPONSE)
    assert session.receive(data, 0.0) == [ResponseStarted(stream_id, OK_RESPONSE)]


# --- foreign peers ---------------------------------------------------------------------------

FOREIGN_REQUEST: Headers = (
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":authority", b"proxy.example:8443"),
    (b":path", b"/status?full=1"),
    (b"user-agent", b"curl/8.5.0"),
    (b"accept", b"*/*"),
)


def plain_h2(*, client: bool) -> h2.connection.H2Connection:
    peer = h2.connection.H2Connection(H2Configuration(client_side=client, header_encoding=None))
    peer.initiate_connection()
    return peer


def test_a_foreign_client_with_huffman_and_a_dynamic_table() -> None:
    peer, session = plain_h2(client=True), Session(client=False, limits=AUTHENTICATED, now=0.0)
    # The first requests leave before our SETTINGS are known, with a table of 4,096 bytes.
    for number in range(6):
        stream_id = peer.get_next_available_stream_id()
        peer.send_headers(stream_id, FOREIGN_REQUEST, end_stream=True)
        events = session.receive(peer.data_to_send(), 0.0)
        assert StreamOpened(stream_id, FOREIGN_REQUEST) in events, number
        session.respond(stream_id, OK_RESPONSE)
        session.send(stream_id, b"fine")
        session.end(stream_id)
        if number >= 2:
            answer = peer.receive_data(session.take_output())
            assert any(isinstance(e, h2.events.ResponseReceived) for e in answer)
    assert session.open_streams == 0
    assert not session.closed


def test_a_foreign_server() -> None:
    peer, session = plain_h2(client=False), Session(client=True, limits=AUTHENTICATED, now=0.0)
    headers: Headers = ((b":status", b"200"), (b"server", b"other"), (b"x-long", b"v" * 200))
    for _ in range(4):
        stream_id = session.open_stream(ROLLOUT_REQUEST, end=True)
        received = peer.receive_data(session.take_output())
        assert any(isinstance(e, h2.events.RequestReceived) for e in received)
        peer.send_headers(stream_id, headers)
        peer.send_data(stream_id, b"body", end_stream=True, pad_length=10)
        events = session.receive(peer.data_to_send(), 0.0)
        assert events[-3:] == [
            ResponseStarted(stream_id, headers),
            DataReceived(stream_id, b"body", 15),
            StreamEnded(stream_id),
        ]
    assert not session.closed


def test_what_is_advertised_is_in_the_first_settings() -> None:
    peer, session = plain_h2(client=True), Session(client=False, limits=PRE_AUTH, now=0.0)
    peer.receive_data(session.take_output())
    settings = peer.remote_settings
    assert settings.header_table_size == 0
    assert settings.max_concurrent_streams == PRE_AUTH.max_streams
    assert settings.initial_window_size == PRE_AUTH.stream_window_bytes
    assert settings.max_frame_size == PRE_AUTH.max_frame_bytes
    assert settings.max_header_list_size == PRE_AUTH.max_header_bytes
    assert peer.outbound_flow_control_window == PRE_AUTH.connection_window_bytes


def test_raised_limits_reach_the_peer() -> None:
    pair = joined(PRE_AUTH)
    pair.server.raise_limits(replace(AUTHENTICATED, connection_window_bytes=16 << 20))
    pair.exchange()
    ids = [pair.client.open_stream(ROLLOUT_REQUEST) for _ in range(5)]
    pair.client.send(ids[0], b"x" * (60 << 10))
    assert max(len(pair.client.take_output()), 0) > 60 << 10  # one frame, above 16 KiB
    assert pair.client.open_streams == 5


# --- slots -----------------------------------------------------------------------------------


def test_before_settings_a_hundred_streams_may_be_opened() -> None:
    session = Session(client=True, limits=AUTHENTICATED, now=0.0)
    for _ in range(100):
        session.open_stream(ROLLOUT_REQUEST)
    assert not session.can_open()
    with pytest.raises(RuntimeError):
        session.open_stream(ROLLOUT_REQUEST)


def test_servers_never_open_streams() -> None:
    assert not joined().server.can_open()


def test_a_freed_slot_is_reported_once() -> None:
    pair = joined(server_limits=replace(AUTHENTICATED, max_streams=2))
    first, second = (pair.client.open_stream(ROLLOUT_REQUEST, end=True) for _ in range(2))
    assert not pair.client.can_open()
    pair.exchange()
    assert pair.take_client_events() == []
    for stream_id in (first, second):
        pair.server.respond(stream_id, OK_RESPONSE, end=True)
    pair.exchange()
    assert pair.take_client_events().count(SlotsFreed()) == 1
    assert pair.client.can_open()


def test_a_slot_freed_by_our_own_reset_is_due_at_once() -> None:
    pair = joined(server_limits=replace(AUTHENTICATED, max_streams=1))
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.reset(stream_id, CANCEL)
    deadline = pair.client.next_deadline()
    assert deadline is not None
    assert deadline < 0
    assert pair.client.tick(0.0) == [SlotsFreed()]


def test_settings_may_free_slots_and_take_them() -> None:
    session = raw_client()
    session.receive(frames(SettingsFrame(0, {SettingCodes.MAX_CONCURRENT_STREAMS: 0})), 0.0)
    assert not session.can_open()
    settings = frames(SettingsFrame(0, {SettingCodes.MAX_CONCURRENT_STREAMS: 1}))
    assert session.receive(settings, 0.0) == [SlotsFreed()]


def test_streams_over_the_limit_are_refused_one_by_one() -> None:
    session = raw_server(replace(AUTHENTICATED, max_streams=2))
    events = session.receive(b"".join(request(i) for i in (1, 3, 5, 7)), 0.0)
    assert [e.stream_id for e in events if isinstance(e, StreamOpened)] == [1, 3]
    output = session.take_output()
    assert frames(RstStreamFrame(5, REFUSED_STREAM), RstStreamFrame(7, REFUSED_STREAM)) in output
    assert not session.closed
    session.reset(1, CANCEL)
    assert session.receive(request(9), 0.0) == [StreamOpened(9, ROLLOUT_REQUEST)]


def test_a_refused_stream_is_safe_to_retry() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    pair.server.reset(stream_id, REFUSED_STREAM)
    pair.exchange()
    assert pair.take_client_events() == [StreamReset(stream_id, REFUSED_STREAM, True)]


def test_used_up_stream_numbers_end_the_session() -> None:
    session = raw_client()
    session._h2.highest_outbound_stream_id = (1 << 31) - 3
    session.open_stream(ROLLOUT_REQUEST)
    assert not session.can_open()
    (closed,) = closings(session.tick(1.0))
    assert isinstance(closed.error, LinkError)


# --- water marks and turns -------------------------------------------------------------------


def test_water_marks() -> None:
    limits = replace(AUTHENTICATED, send_high_bytes=1000, send_low_bytes=100)
    pair = joined(limits)
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.send(stream_id, b"x" * 999)
    assert pair.client.writable(stream_id)
    pair.client.send(stream_id, b"x")
    assert not pair.client.writable(stream_id)
    assert pair.client.buffered_bytes(stream_id) == 1000
    pair.client.take_output()
    assert pair.client.writable(stream_id)
    deadline = pair.client.next_deadline()
    assert deadline is not None
    assert deadline < 0
    assert pair.client.take_events() == [StreamWritable(stream_id)]
    assert pair.client.take_events() == []


def test_no_event_without_high_water() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.send(stream_id, b"x" * 1000)
    pair.client.take_output()
    assert pair.client.take_events() == []


def test_a_small_body_does_not_wait_behind_a_large_one() -> None:
    pair = joined()
    large, small = (pair.client.open_stream(ROLLOUT_REQUEST) for _ in range(2))
    pair.client.send(large, b"x" * (900 << 10))
    pair.client.send(small, b"small")
    pair.client.end(small)
    pair.to_server()
    events = pair.take_server_events()
    ahead = events[: events.index(StreamEnded(small))]
    assert 0 < len(data_of(ahead, large)) <= 128 << 10


def test_senders_take_turns_when_the_connection_window_is_short() -> None:
    limits = replace(AUTHENTICATED, connection_window_bytes=64 << 10)
    pair = joined(limits)
    ids = [pair.client.open_stream(ROLLOUT_REQUEST) for _ in range(4)]
    for stream_id in ids:
        pair.client.send(stream_id, b"x" * (100 << 10))
    received = dict.fromkeys(ids, 0)
    for _ in range(6):
        pair.exchange()
        for event in pair.take_server_events():
            if isinstance(event, DataReceived):
                received[event.stream_id] += len(event.data)
                pair.server.acknowledge(event.stream_id, event.flow_bytes)
    assert max(received.values()) - min(received.values()) <= 64 << 10
    assert min(received.values()) > 0


def test_a_widened_stream_takes_more_before_it_is_read() -> None:
    limits = replace(AUTHENTICATED, stream_window_bytes=64 << 10)
    pair = joined(limits)
    wide, plain = (pair.client.open_stream(ROLLOUT_REQUEST) for _ in range(2))
    for stream_id in (wide, plain):
        pair.client.send(stream_id, b"x" * (400 << 10))
    pair.exchange()
    pair.server.widen(wide, 128 << 10)
    pair.exchange()
    events = pair.take_server_events()
    assert len(data_of(events, wide)) == 192 << 10
    assert len(data_of(events, plain)) == 64 << 10
    pair.server.reset(wide, CANCEL)
    pair.server.widen(wide, 1)  # nothing is left of it
    pair.exchange()
    assert not closings(pair.take_client_events())


def test_a_peer_that_opens_its_window_only_at_exhaustion() -> None:
    session = raw_client()
    ids = [session.open_stream(ROLLOUT_REQUEST) for _ in range(8)]
    for stream_id in ids:
        session.send(stream_id, b"x" * (100 << 10))
    left = 65_535
    sent = 0
    while data := session.take_output():
        bodies = sum(f.length for f in parsed(data) if f.kind == 0)
        left -= bodies
        sent += bodies
        assert left >= 0
        if left == 0:
            session.receive(frames(*(WindowUpdateFrame(i, 65_535) for i in (0, *ids))), 0.0)
            left = 65_535
    assert sent == 8 * (100 << 10)


def test_a_window_that_shrinks_below_zero_holds_the_stream() -> None:
    session = raw_client()
    stream_id = session.open_stream(ROLLOUT_REQUEST)
    session.send(stream_id, b"x" * 100_000)
    session.take_output()
    shrunk = frames(SettingsFrame(0, {SettingCodes.INITIAL_WINDOW_SIZE: 100}))
    session.receive(shrunk + frames(WindowUpdateFrame(0, 100_000)), 0.0)
    assert all(f.kind != 0 for f in parsed(session.take_output()))
    # 65,535 bytes are gone, 100 are allowed: one more only after 65,436 were added.
    session.receive(frames(WindowUpdateFrame(stream_id, 65_435)), 0.0)
    assert session.take_output() == b""
    session.receive(frames(WindowUpdateFrame(stream_id, 1)), 0.0)
    assert [f.length for f in parsed(session.take_output())] == [1]
    session.receive(frames(SettingsFrame(0, {SettingCodes.INITIAL_WINDOW_SIZE: 110})), 0.0)
    assert [f.length for f in parsed(session.take_output()) if f.kind == 0] == [10]


def test_no_frame_is_larger_than_the_peer_takes() -> None:
    session = raw_client()
    session.receive(frames(SettingsFrame(0, {SettingCodes.MAX_FRAME_SIZE: 20_000})), 0.0)
    stream_id = session.open_stream(ROLLOUT_REQUEST)
    session.send(stream_id, b"x" * 60_000)
    lengths = [f.length for f in parsed(session.take_output()) if f.kind == 0]
    assert lengths == [20_000, 20_000, 20_000]


def test_an_end_needs_no_window() -> None:
    session = raw_client()
    session.receive(frames(SettingsFrame(0, {SettingCodes.INITIAL_WINDOW_SIZE: 0})), 0.0)
    stream_id = session.open_stream(ROLLOUT_REQUEST)
    session.take_output()
    session.end(stream_id)
    assert session.take_output() == frames(DataFrame(stream_id, flags=["END_STREAM"]))


# --- resets ----------------------------------------------------------------------------------


def test_a_reset_reaches_the_other_side_and_frees_both() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.send(stream_id, b"x" * 100)
    pair.exchange()
    pair.take_server_events()
    pair.client.send(stream_id, b"never sent")
    pair.client.reset(stream_id, CANCEL)
    pair.exchange()
    assert pair.take_server_events() == [StreamReset(stream_id, CANCEL, False)]
    assert pair.client.open_streams == pair.server.open_streams == 0
    assert pair.client.buffered_bytes(stream_id) == 0


def test_resets_that_cross_are_nobodys_fault() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    pair.client.reset(stream_id, CANCEL)
    pair.server.respond(stream_id, OK_RESPONSE)
    pair.server.send(stream_id, b"x" * 100)
    pair.server.reset(stream_id, CANCEL)
    pair.take_server_events()
    pair.exchange()
    assert pair.take_client_events() == []
    assert pair.take_server_events() == []
    assert not pair.client.closed
    assert not pair.server.closed


def test_calls_on_a_stream_that_is_gone_do_nothing() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    pair.client.reset(stream_id, CANCEL)
    pair.exchange()
    for session in (pair.client, pair.server):
        session.send(stream_id, b"late")
        session.end(stream_id)
        session.reset(stream_id, CANCEL)
        session.acknowledge(stream_id, 0)
        assert session.writable(stream_id)
        assert session.take_output() == b""
    pair.server.respond(stream_id, OK_RESPONSE)
    assert pair.server.take_output() == b""


def test_an_answer_in_flight_to_a_stream_that_was_given_up_is_dropped() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST, end=True)
    pair.exchange()
    pair.server.respond(stream_id, OK_RESPONSE)
    pair.server.send(stream_id, b"x" * (200 << 10))
    pair.server.end(stream_id)
    pair.client.reset(stream_id, CANCEL)
    pair.exchange()
    assert pair.take_client_events() == []
    assert not pair.client.closed
    assert not pair.server.closed


CLOSED_KINDS = ["reset by us", "reset by the peer", "ended", "refused", "malformed"]
LATE_FRAMES = {
    "DATA": frames(DataFrame(1, b"late" * 30)),
    "HEADERS": request(1, ((b"x", b"1"),), end=True),
    "RST_STREAM": frames(RstStreamFrame(1, CANCEL)),
    "WINDOW_UPDATE": frames(WindowUpdateFrame(1, 100)),
    "PRIORITY": frames(PriorityFrame(1, depends_on=3)),
}


def closed_stream(kind: str) -> Session:
    """A server session whose stream 1 has come to its end."""
    limits = replace(AUTHENTICATED, max_streams=0 if kind == "refused" else 10)
    session = raw_server(limits)
    malformed = ((b":path", b"/x"), (b":path", b"/y"))
    session.receive(request(1, malformed if kind == "malformed" else ROLLOUT_REQUEST), 0.0)
    if kind == "reset by us":
        session.reset(1, CANCEL)
    elif kind == "reset by the peer":
        session.receive(frames(RstStreamFrame(1, CANCEL)), 0.0)
    elif kind == "ended":
        session.receive(frames(DataFrame(1, flags=["END_STREAM"])), 0.0)
        session.respond(1, OK_RESPONSE, end=True)
    assert session.open_streams == 0
    session.take_output()
    return session


@pytest.mark.parametrize("late", LATE_FRAMES)
@pytest.mark.parametrize("kind", CLOSED_KINDS)
def test_late_frames_on_closed_streams(kind: str, late: str) -> None:
    session = closed_stream(kind)
    events = session.receive(LATE_FRAMES[late] * 3, 0.0)
    if kind == "ended" and late == "HEADERS":  # RFC 9113 5.1: only a broken peer can send this
        assert isinstance(closings(events)[0].error, PeerProtocolError)
    else:
        assert events == []
        assert not session.closed


def test_late_data_after_our_reset_is_not_answered_frame_by_frame() -> None:
    session = closed_stream("reset by us")
    session.receive(LATE_FRAMES["DATA"] * 50, 0.0)
    assert session.take_output() == b""


def test_data_after_the_end_of_a_request_resets_the_stream() -> None:
    session = raw_server()
    session.receive(request(1, end=True) + request(3), 0.0)
    assert session.receive(frames(DataFrame(1, b"more")), 0.0) == [StreamReset(1, 5, False)]
    assert not session.closed
    assert session.open_streams == 1


@pytest.mark.parametrize(
    "headers",
    [
        ((b":method", b"GET"),),
        (*ROLLOUT_REQUEST, (b"x-a", b" leading")),
        (*ROLLOUT_REQUEST, (b"x-a", b"line\nbreak")),
        (*ROLLOUT_REQUEST, (b"Upper", b"1")),
        (*ROLLOUT_REQUEST, (b"connection", b"close")),
        (*ROLLOUT_REQUEST, (b"content-length", b"x")),
        (*ROLLOUT_REQUEST, (b"", b"x")),
    ],
)
def test_malformed_headers_end_their_stream_only(headers: Headers) -> None:
    session = raw_server()
    for stream_id in (1, 3):  # twice: a verdict that is remembered must stay the same
        assert session.receive(request(stream_id, headers), 0.0) == []
        assert frames(RstStreamFrame(stream_id, 1)) in session.take_output()
    assert session.receive(request(5), 0.0) == [StreamOpened(5, ROLLOUT_REQUEST)]


@pytest.mark.parametrize("body", [b"123", b"12345"])
def test_a_wrong_content_length_ends_its_stream_only(body: bytes) -> None:
    session = raw_server()
    headers = (*ROLLOUT_REQUEST, (b"content-length", b"4"))
    session.receive(request(1, headers), 0.0)
    events = session.receive(frames(DataFrame(1, body, flags=["END_STREAM"])), 0.0)
    assert events == [StreamReset(1, 1, False)]
    assert session.receive(request(3), 0.0) == [StreamOpened(3, ROLLOUT_REQUEST)]


def test_a_window_that_overflows_ends_its_stream_only() -> None:
    session = raw_server()
    session.receive(request(1), 0.0)
    assert session.receive(frames(WindowUpdateFrame(1, (1 << 31) - 1)), 0.0) == [
        StreamReset(1, 3, False)
    ]
    assert not session.closed


# --- programming errors ----------------------------------------------------------------------


def test_misuse_is_an_error_of_ours() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    pair.client.send(stream_id, b"x")
    pair.client.end(stream_id)
    with pytest.raises(RuntimeError):
        pair.client.send(stream_id, b"y")
    with pytest.raises(RuntimeError):
        pair.client.respond(stream_id, OK_RESPONSE)
    pair.server.respond(stream_id, OK_RESPONSE)
    with pytest.raises(RuntimeError):
        pair.server.respond(stream_id, OK_RESPONSE)


def test_headers_that_peers_must_reject_are_not_sent() -> None:
    pair = joined()
    with pytest.raises(ValueError, match="x-a"):
        pair.client.open_stream((*ROLLOUT_REQUEST, (b"x-a", b"1\r\n")))
    assert pair.client.open_streams == 0
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    with pytest.raises(ValueError, match="status"):
        pair.server.respond(stream_id, ROLLOUT_REQUEST)
    pair.server.respond(stream_id, OK_RESPONSE)


# --- liveness --------------------------------------------------------------------------------


def test_a_ping_measures_the_round_trip() -> None:
    pair = joined()
    assert pair.client.next_deadline() == 10.0
    assert pair.client.tick(9.9) == []
    assert pair.client.take_output() == b""
    assert pair.client.tick(10.0) == []
    pair.now = 10.25
    pair.exchange()
    assert pair.client_events == [PingAcked(0.25)]
    assert pair.client.next_deadline() == 20.0


def test_silence_after_a_ping_ends_the_session_at_its_deadline() -> None:
    pair = joined()
    pair.client.tick(10.0)
    assert pair.client.next_deadline() == 20.0
    assert pair.client.tick(19.9) == []
    (closed,) = pair.client.tick(20.0)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, LinkError)
    assert not isinstance(closed.error, PeerProtocolError)
    assert pair.client.next_deadline() is None


def test_any_byte_is_a_proof_of_life() -> None:
    pair = joined()
    pair.client.tick(10.0)
    pair.client.take_output()
    pair.client.receive(b"\x00", 18.0)  # the beginning of a frame
    assert pair.client.next_deadline() == 28.0
    assert pair.client.tick(27.9) == []
    assert closings(pair.client.tick(28.0))


def test_settings_must_come_in_time() -> None:
    for client in (True, False):
        session = Session(client=client, limits=AUTHENTICATED, now=100.0)
        assert session.next_deadline() == 105.0
        assert session.tick(104.9) == []
        assert len(closings(session.tick(105.0))) == 1
        assert session.tick(106.0) == []


def test_a_header_block_must_end_in_time() -> None:
    session = raw_server()
    session.receive(request(1, end_headers=False), 2.0)
    session.receive(frames(ContinuationFrame(1, b"")), 8.0)
    assert session.next_deadline() == 10.0  # the ping; the block is due at 12
    session.tick(10.0)
    assert session.next_deadline() == 12.0
    assert closings(session.tick(12.0))


@pytest.mark.parametrize("limits", [PRE_AUTH, AUTHENTICATED])
def test_a_header_frame_must_be_whole_in_time(limits: Limits) -> None:
    session = raw_server(limits)
    frame = request(1)
    for second in range(7):
        session.receive(frame[second : second + 1], 2.0 + second)
    session.tick(10.0)
    assert session.next_deadline() == 12.0
    assert closings(session.tick(12.0))


def test_a_data_frame_must_be_whole_in_time_until_the_peer_is_known() -> None:
    session = raw_server(PRE_AUTH)
    session.receive(request(1) + data(1, bytes(100))[:50], 2.0)
    session.tick(10.0)
    assert session.next_deadline() == 12.0
    session.raise_limits(AUTHENTICATED)
    assert session.next_deadline() == 20.0  # of the ping
    session.receive(bytes(10), 19.0)
    assert session.tick(20.0) == []


def test_every_frame_has_a_deadline_of_its_own() -> None:
    session = raw_server(replace(PRE_AUTH, ping_s=1e6))
    session.receive(request(1) + data(1, bytes(100))[:50], 0.0)
    rest = data(1, bytes(100))[50:]
    for now in (9.0, 18.0, 27.0):  # each reading ends one frame and begins the next
        assert session.tick(now) == []
        session.receive(rest + data(1, bytes(100))[:50], now)
    session.receive(rest + request(3, end_headers=False), 36.0)
    session.receive(frames(ContinuationFrame(3, b"")), 45.0)  # parts of a block share one
    assert session.tick(45.9) == []
    assert closings(session.tick(46.0))


def test_much_work_is_done_in_portions() -> None:
    session = raw_server()
    pairs = b"".join(headers(i) + reset(i) for i in range(1, 2401, 2))
    events, portions = session.receive(pairs, 0.0), 1
    while session.backlog:
        assert len(events) <= WORK_A_CALL * portions
        events += session.receive(b"", 0.0)
        portions += 1
    assert sum(isinstance(event, StreamOpened) for event in events) == 1200
    assert portions >= 2400 // WORK_A_CALL


def test_dear_frames_make_smaller_portions() -> None:
    session = raw_server()
    block = GET + field(b"x", b"y") + b"\x90" * 50  # a field a byte
    frame_count = 40
    session.receive(b"".join(headers(i, block) for i in range(1, 2 * frame_count, 2)), 0.0)
    assert session.backlog
    assert session.open_streams < frame_count // 2


def test_an_ordinary_reading_is_one_portion() -> None:
    session = raw_server()
    body = bytes(1500)
    session.receive(b"".join(request(i) + data(i, body, end=True) for i in range(1, 43, 2)), 0.0)
    assert not session.backlog


def test_ping_times_come_from_registration() -> None:
    pair = joined()
    pair.client.set_ping(2.0, 3.0, 1.0)
    assert pair.client.next_deadline() == 3.0
    pair.client.tick(3.0)
    assert pair.client.next_deadline() == 6.0


# --- the end ---------------------------------------------------------------------------------


def test_a_clean_goodbye() -> None:
    pair = joined()
    stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
    pair.client.close(0, "drained")
    assert pair.client.closed
    assert not pair.client.can_open()
    pair.exchange()
    assert pair.take_server_events()[-1] == SessionClosed(
        None, "the peer closed the connection: drained"
    )
    assert pair.take_client_events() == [SessionClosed(None, "drained")]
    for session in (pair.client, pair.server):
        session.send(stream_id, b"x")
        session.end(stream_id)
        session.reset(stream_id, CANCEL)
        session.acknowledge(stream_id, 5)
        session.raise_limits(AUTHENTICATED)
        session.close(0, "again")
        assert session.receive(b"anything", 1.0) == []
        assert session.tick(100.0) == []
        assert session.next_deadline() is None
        assert session.take_output() == b""


def test_a_goodbye_with_an_error_names_it() -> None:
    session = raw_client()
    (closed,) = session.receive(frames(GoAwayFrame(0, 0, 11, b"calm down")), 0.0)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, LinkError)
    assert "calm down" in closed.reason
    assert "11" in closed.reason


def test_events_before_a_fault_are_delivered() -> None:
    session = raw_server()
    data = request(1) + frames(DataFrame(1, b"fine")) + b"\xff" * 9 + request(3)
    events = session.receive(data, 0.0)
    assert events[:2] == [StreamOpened(1, ROLLOUT_REQUEST), DataReceived(1, b"fine", 4)]
    assert isinstance(events[2], SessionClosed)
    assert isinstance(events[2].error, PeerProtocolError)
    assert len(events) == 3
    goodbye = session.take_output()
    assert [f.kind for f in parsed(goodbye)][-1] == 7
    assert session.receive(request(5), 0.0) == []


def test_a_server_may_not_open_streams() -> None:
    session = raw_client()
    frame = HeadersFrame(2, data=b"\x88", flags=["END_HEADERS"])
    (closed,) = session.receive(frames(frame), 0.0)
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, PeerProtocolError)


class Parsed:
    def __init__(self, kind: int, length: int) -> None:
        self.kind, self.length = kind, length


def parsed(data: bytes) -> list[Parsed]:
    """The frames of our own output."""
    found = []
    while data:
        length = int.from_bytes(data[:3], "big")
        found.append(Parsed(data[3], length))
        data = data[9 + length :]
    return found
