"""Volume alone never trips a budget, and windows are whole after it."""

from __future__ import annotations

import faulthandler

import pytest

from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH
from asyncgrpo_agent.wire.session import DataReceived, Session, StreamEnded
from fakes.sessions import Pair, joined

IN_FLIGHT = 100
QUESTION, ANSWER = b"q" * 150, b"a" * 300
CLOSED_STREAMS = 1 << 14  # that a connection remembers


def serve(pair: Pair) -> None:
    """Take in what the server was sent, and answer the requests that have ended."""
    for event in pair.take_server_events():
        if isinstance(event, DataReceived):
            pair.server.acknowledge(event.stream_id, event.flow_bytes)
        elif isinstance(event, StreamEnded):
            pair.server.respond(event.stream_id, OK_RESPONSE)
            pair.server.send(event.stream_id, ANSWER)
            pair.server.end(event.stream_id)


def ask(pair: Pair, number: int) -> int:
    """Ask and be answered `number` times at once; gives the bytes of the answers."""
    for _ in range(number):
        stream_id = pair.client.open_stream(ROLLOUT_REQUEST)
        pair.client.send(stream_id, QUESTION)
        pair.client.end(stream_id)
    pair.exchange()
    serve(pair)
    pair.exchange()
    answered_bytes = 0
    for event in pair.take_client_events():
        if isinstance(event, DataReceived):
            answered_bytes += len(event.data)
            pair.client.acknowledge(event.stream_id, event.flow_bytes)
    return answered_bytes


def upload(sender: Session, pair: Pair) -> None:
    """Use the connection's window nearly up: four streams, each with a whole window."""
    for _ in range(4):
        stream_id = sender.open_stream(ROLLOUT_REQUEST)
        sender.send(stream_id, bytes(1 << 20))
    pair.exchange()
    events = pair.take_server_events()
    assert sum(len(e.data) for e in events if isinstance(e, DataReceived)) == 4 << 20


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(10_000, marks=pytest.mark.slow),
        pytest.param(1_000_000, marks=[pytest.mark.deep, pytest.mark.slow]),
    ],
)
def test_ordinary_requests_at_one_instant_leave_everything_whole(requests: int) -> None:
    faulthandler.cancel_dump_traceback_later()  # it is for tests that hang, not for long ones
    pair = joined()
    for _ in range(requests // IN_FLIGHT):
        assert ask(pair, IN_FLIGHT) == IN_FLIGHT * len(ANSWER)
    assert not pair.client.closed
    assert not pair.server.closed
    assert pair.client.open_streams == pair.server.open_streams == 0
    for session in (pair.client, pair.server):
        assert len(session._h2._closed_streams) <= CLOSED_STREAMS
    upload(pair.client, pair)


def test_a_peer_with_all_its_streams_open_may_cancel_half_of_them_at_once() -> None:
    pair = joined(PRE_AUTH)
    pair.client.open_stream(CONTROL_REQUEST)
    pair.exchange()
    for session in (pair.client, pair.server):
        session.raise_limits(AUTHENTICATED)
    pair.exchange()
    opened = []
    while pair.client.can_open():
        opened.append(pair.client.open_stream(ROLLOUT_REQUEST))
    pair.exchange()
    assert len(opened) == AUTHENTICATED.max_streams - 1
    for stream_id in opened[: len(opened) // 2]:
        pair.client.reset(stream_id, 8)
        pair.client.open_stream(ROLLOUT_REQUEST)
    pair.exchange()
    assert not pair.server.closed
    assert pair.server.open_streams == AUTHENTICATED.max_streams
