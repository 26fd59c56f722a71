"""The substance of h2spec's cases, and the same questions to a session that is the client.

The tables are in `fakes.conformance`, which also says how to read an outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from asyncgrpo_agent.wire.frames import PREFACE
from asyncgrpo_agent.wire.headers import OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from asyncgrpo_agent.wire.session import Event, Session
from fakes.conformance import (
    CLIENT,
    EITHER,
    FLOW_CONTROL_ERROR,
    IGNORED,
    LARGEST_WINDOW,
    LATE,
    PONG,
    PROTOCOL_ERROR,
    SERVER,
    STREAM_CLOSED,
    Row,
    ping,
    whole,
)
from fakes.sessions import raw_client, raw_server
from fakes.wire_frames import (
    CONTINUATION,
    END_HEADERS,
    GET,
    PRIORITY,
    SETTINGS,
    data,
    field,
    headers,
    raw,
    reset,
    settings,
    window,
    words_of_events,
    words_of_output,
)


def outcome_of(session: Session, wire: bytes, chunk_bytes: int) -> str:
    events: list[Event] = []
    for start in range(0, len(wire), chunk_bytes):
        events += session.receive(wire[start : start + chunk_bytes], 0.0)
    return ", ".join((*words_of_events(events), *words_of_output(session.take_output())))


def server() -> Session:
    return raw_server(AUTHENTICATED)


def client() -> Session:
    session = raw_client(AUTHENTICATED)
    session.open_stream(ROLLOUT_REQUEST)
    session.take_output()
    return session


CASES = [
    *(pytest.param(server, row, id=f"server {row}") for row in EITHER + SERVER),
    *(pytest.param(client, row, id=f"client {row}") for row in EITHER + CLIENT),
]


@pytest.mark.parametrize(("begin", "row"), CASES)
def test_frames_and_what_comes_of_them(begin: Callable[[], Session], row: Row) -> None:
    assert outcome_of(begin(), row.wire, len(row.wire)) == row.outcome
    assert outcome_of(begin(), row.wire, 1 if len(row.wire) < 1000 else 1000) == row.outcome


PREFACES = {
    "3.5 no preface": (b"INVALID CONNECTION PREFACE\r\n\r\n", PROTOCOL_ERROR),
    "3.5 preface without SETTINGS": (PREFACE + whole, PROTOCOL_ERROR),
    "3.5 SETTINGS that are too long": (
        PREFACE + raw(SETTINGS, 0, 0, bytes(17000)),
        "closed, GOAWAY ENHANCE_YOUR_CALM",
    ),
    "3.5 preface": (PREFACE + settings(), "settings ack"),
}


@pytest.mark.parametrize("name", PREFACES)
def test_how_a_client_begins(name: str) -> None:
    wire, outcome = PREFACES[name]
    session = Session(client=False, limits=AUTHENTICATED, now=0.0, strict_codec=True)
    own = ", ".join(words_of_output(session.take_output()))
    assert own == "settings, window"
    assert outcome_of(session, wire, len(wire)) == outcome


def answered() -> Session:
    """A server that has answered stream 1 in full."""
    session = server()
    session.receive(whole, 0.0)
    session.respond(1, OK_RESPONSE, end=True)
    session.take_output()
    return session


def given_up() -> Session:
    """A server that has reset stream 1."""
    session = server()
    session.receive(headers(1), 0.0)
    session.reset(1, 8)
    session.take_output()
    return session


# Frames that were under way when we reset the stream are no fault of the peer's; ones on a stream
# that both sides have ended are.
CLOSED = [
    (answered, "DATA", data(1), LATE),
    (answered, "HEADERS", headers(1, end=True), STREAM_CLOSED),
    (answered, "CONTINUATION", raw(CONTINUATION, END_HEADERS, 1, GET), STREAM_CLOSED),
    (answered, "WINDOW_UPDATE", window(1, 1), IGNORED),
    (answered, "RST_STREAM", reset(1), IGNORED),
    (answered, "PRIORITY", raw(PRIORITY, 0, 1, bytes(5)), IGNORED),
    (given_up, "DATA", data(1) * 3, IGNORED),
    (given_up, "DATA to the end", data(1, end=True), IGNORED),
    (given_up, "trailers", headers(1, field(b"x", b"y"), end=True), LATE),
    (given_up, "WINDOW_UPDATE", window(1, 1), IGNORED),
    (given_up, "RST_STREAM", reset(1), IGNORED),
    (given_up, "PRIORITY", raw(PRIORITY, 0, 1, bytes(5)), IGNORED),
]


@pytest.mark.parametrize(
    ("begin", "wire", "outcome"),
    [pytest.param(b, w, o, id=f"5.1 {b.__name__}: {name}") for b, name, w, o in CLOSED],
)
def test_frames_on_a_closed_stream(begin: Callable[[], Session], wire: bytes, outcome: str) -> None:
    session = begin()
    assert outcome_of(session, wire, len(wire)) == outcome
    if not outcome:  # the connection works
        assert outcome_of(session, headers(3, end=True), 100) == "opened 3, ended 3"


def test_5_1_2_one_stream_too_many_is_refused_alone() -> None:
    session = raw_server(replace(AUTHENTICATED, max_streams=1))
    wire = headers(1) + headers(3) + data(3) + ping
    assert outcome_of(session, wire, len(wire)) == f"opened 1, RST 3 REFUSED_STREAM, {PONG}"


def test_6_4_resets_end_their_stream_only() -> None:
    session = server()
    wire = headers(1) + headers(3) + reset(1) + data(3)
    assert outcome_of(session, wire, 1) == "opened 1, opened 3, gone 1, data 3 1"


# --- flow control ----------------------------------------------------------------------------


def answering(session: Session, size_bytes: int) -> str:
    session.receive(whole, 0.0)
    session.respond(1, OK_RESPONSE)
    session.send(1, bytes(size_bytes))
    session.end(1)
    return ", ".join(words_of_output(session.take_output()))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_6_9_1_a_small_window_is_kept_to(size: int) -> None:
    session = server()
    assert outcome_of(session, settings((4, size)), 1) == "settings ack"
    assert answering(session, 5) == (f"headers, sent 1 {size}" if size else "headers")
    assert outcome_of(session, window(1, 1), 1) == "sent 1 1"
    assert outcome_of(session, window(1, 100), 1) == f"sent 1 {4 - size}"


def test_6_9_2_settings_move_the_windows_of_open_streams() -> None:
    session = server()
    assert outcome_of(session, settings((4, 0)), 1) == "settings ack"
    assert answering(session, 5) == "headers"
    assert outcome_of(session, settings((4, 1)), 1) == "settings ack, sent 1 1"


def test_6_9_2_a_window_may_become_negative() -> None:
    session = server()
    assert outcome_of(session, settings((4, 3)), 1) == "settings ack"
    assert answering(session, 5) == "headers, sent 1 3"
    assert outcome_of(session, settings((4, 2)), 1) == "settings ack"
    assert outcome_of(session, window(1, 1), 1) == IGNORED
    assert outcome_of(session, window(1, 1), 1) == "sent 1 1"


def test_6_9_2_settings_may_not_push_a_window_over_the_limit() -> None:
    session = server()
    wire = headers(1) + window(1, LARGEST_WINDOW - 65535) + settings((4, 65536))
    assert outcome_of(session, wire, 1) == f"opened 1, {FLOW_CONTROL_ERROR}"


@pytest.mark.parametrize("begin", [server, client])
def test_6_5_3_settings_hold_once_they_are_acknowledged(begin: Callable[[], Session]) -> None:
    session = begin()
    assert outcome_of(session, settings((5, 20000)) + ping, 1) == f"settings ack, {PONG}"
