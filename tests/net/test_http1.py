"""The HTTP/1.1 server against clients that are well-behaved, slow, rude or broken."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair

from asyncgrpo_agent.errors import EngineError, StoreError
from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.http1 import Handler, Limits, Request, Response
from fakes.http_client import FakeClient

Stream = trio.abc.HalfCloseableStream
Connect = Callable[..., Stream]


async def echo(request: Request) -> Response:
    return Response(status=200, content_type="text/plain", body=request.body)


async def read_all(stream: Stream) -> bytes:
    data = b""
    while chunk := await stream.receive_some(65536):
        data += chunk
    return data


@pytest.fixture
def connect(nursery: trio.Nursery) -> Connect:
    """Starts a connection to a handler and gives the client's end."""

    def start(handler: Handler = echo, **limits: float) -> Stream:
        client, server = memory_stream_pair()
        settings = Limits(**limits)  # type: ignore[arg-type]
        serve = partial(http1.serve_connection, server, handler, hop="test", limits=settings)
        nursery.start_soon(serve)
        return client

    return start


# --- exchanges -----------------------------------------------------------------------------------


async def test_requests_share_a_connection(connect: Connect) -> None:
    client = FakeClient(connect())
    for body in (b"first", b"", b"x" * 300_000):
        status, headers, answer = await client.ask(body=body)
        assert (status, answer) == (200, body)
        assert headers["content-length"] == str(len(body))


async def test_what_a_handler_sees(connect: Connect) -> None:
    seen = []

    async def record(request: Request) -> Response:
        seen.append(request)
        return http1.json_response(201, {"ok": True})

    client = FakeClient(connect(record))
    status, headers, body = await client.ask(target="/a/b?x=1&y=", body=b"{}", Accept="q")
    assert (status, headers["content-type"], body) == (201, "application/json", b'{"ok":true}')
    (request,) = seen
    assert (request.method, request.path, request.body) == ("POST", "/a/b", b"{}")
    assert request.query == {"x": "1", "y": ""}
    assert request.headers["accept"] == "q"


async def test_repeated_headers_are_joined(connect: Connect) -> None:
    seen = []

    async def record(request: Request) -> Response:
        seen.append(request.headers["x"])
        return await echo(request)

    stream = connect(record)
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: h\r\nX: 1\r\nX: 2\r\nconnection: close\r\n\r\n")
    await read_all(stream)
    assert seen == ["1, 2"]


async def test_pipelined_requests_are_answered_in_order(connect: Connect) -> None:
    stream = connect()
    one = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\n"
    last = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nconnection: close\r\n\r\n"
    await stream.send_all(one + b"a" + one + b"b" + last + b"c")
    answers = await read_all(stream)
    assert [part[-1:] for part in answers.split(b"HTTP/1.1 200")[1:]] == [b"a", b"b", b"c"]


async def test_bytes_that_come_while_a_handler_runs_are_the_next_request(
    connect: Connect, autojump_clock: MockClock
) -> None:
    async def slow(request: Request) -> Response:
        await trio.sleep(5)
        return await echo(request)

    client = FakeClient(connect(slow))
    await client.send(body=b"first")
    await trio.sleep(1)
    await client.stream.send_all(b"GET /next HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert (await client.receive())[2] == b"first"
    assert (await read_all(client.stream)).startswith(b"HTTP/1.1 200")


async def test_chunked_bodies_are_joined(connect: Connect) -> None:
    stream = connect()
    await stream.send_all(
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert (await read_all(stream)).endswith(b"\r\n\r\nabcde")


async def test_a_head_request_gets_no_body(connect: Connect) -> None:
    async def full(_: Request) -> Response:
        return Response(status=200, content_type="text/plain", body=b"body")

    client = FakeClient(connect(full))
    status, headers, body = await client.ask(method="HEAD")
    assert (status, headers["content-length"], body) == (200, "4", b"")
    assert (await client.ask())[2] == b"body"


async def test_a_head_request_that_is_refused_gets_none_either(connect: Connect) -> None:
    stream = connect(body_bytes=100)
    await stream.send_all(b"HEAD / HTTP/1.1\r\nhost: h\r\ncontent-length: 101\r\n\r\n")
    answer = await read_all(stream)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_client_that_waits_is_told_to_continue(connect: Connect) -> None:
    stream = connect()
    await stream.send_all(
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\nexpect: 100-continue\r\n"
        b"connection: close\r\n\r\n"
    )
    assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 100")
    await stream.send_all(b"ok")
    assert (await read_all(stream)).endswith(b"ok")


async def test_a_client_that_waits_with_too_much_is_refused_at_once(connect: Connect) -> None:
    stream = connect(body_bytes=10)
    await stream.send_all(
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\r\n"
    )
    await stream.send_eof()
    assert (await read_all(stream)).startswith(b"HTTP/1.1 413")


# --- limits --------------------------------------------------------------------------------------


async def test_a_declared_body_over_the_limit_is_refused(connect: Connect) -> None:
    client = FakeClient(connect(body_bytes=10))
    status, headers, body = await client.ask(body=b"x" * 11)
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["hop"] == "test"


async def test_a_chunked_body_over_the_limit_is_refused(connect: Connect) -> None:
    stream = connect(body_bytes=10)
    await stream.send_all(
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + b"4\r\nabcd\r\n" * 3
    )
    await stream.send_eof()
    assert (await read_all(stream)).startswith(b"HTTP/1.1 413")


async def test_headers_over_the_limit_are_refused(connect: Connect) -> None:
    stream = connect(header_bytes=1000)
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 2000)
    await stream.send_eof()
    assert (await read_all(stream)).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    ("sent", "expected_s", "answer"),
    [
        (b"", 75.0, b""),
        (b"POST / HT", 10.0, b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nx", 60.0, b"HTTP/1.1 408"),
    ],
)
async def test_slow_clients_meet_deadlines(
    connect: Connect, autojump_clock: MockClock, sent: bytes, expected_s: float, answer: bytes
) -> None:
    stream = connect()
    started = trio.current_time()
    await stream.send_all(sent)
    assert (await stream.receive_some(12)) == answer
    assert trio.current_time() - started == pytest.approx(expected_s)


async def test_trickled_headers_do_not_extend_the_deadline(
    connect: Connect, autojump_clock: MockClock
) -> None:
    stream = connect()
    started = trio.current_time()
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: h\r\n")
    for _ in range(3):
        await trio.sleep(3)
        await stream.send_all(b"x: y\r\n")
    assert (await stream.receive_some(12)) == b"HTTP/1.1 408"
    assert trio.current_time() - started == pytest.approx(10)


async def test_a_client_that_does_not_read_is_dropped(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    client, server = lockstep_stream_pair()
    nursery.start_soon(partial(http1.serve_connection, server, echo, hop="test"))
    await client.send_all(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
    await trio.sleep(61)
    with pytest.raises(trio.BrokenResourceError):
        await client.send_all(b"x")


# --- clients that leave --------------------------------------------------------------------------


async def test_a_handler_is_cancelled_when_its_client_leaves(
    connect: Connect, autojump_clock: MockClock
) -> None:
    ended = []

    async def generate(request: Request) -> Response:
        try:
            await trio.sleep(1000)
        finally:
            ended.append(trio.current_time())
        return await echo(request)

    client = FakeClient(connect(generate))
    started = trio.current_time()
    await client.send()
    await trio.sleep(3)
    await client.stream.aclose()
    await trio.sleep(1)
    assert ended == [pytest.approx(started + 3)]


async def test_a_client_that_leaves_amid_a_request(connect: Connect) -> None:
    stream = connect()
    await stream.send_all(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nx")
    await stream.send_eof()
    assert (await read_all(stream)).startswith(b"HTTP/1.1 400")


# --- failures ------------------------------------------------------------------------------------


async def test_agent_errors_become_answers(connect: Connect) -> None:
    errors = [StoreError("no space", where="/mnt", fix="Free some."), EngineError("x", status=0)]

    async def fail(_: Request) -> Response:
        raise errors.pop(0)

    client = FakeClient(connect(fail))
    status, _, body = await client.ask()
    assert status == 500
    assert json.loads(body) == {
        "error": {
            "message": "/mnt: no space. Free some.",
            "type": "StoreError",
            "code": 500,
            "hop": "test",
            "may_have_run": True,
        }
    }
    assert (await client.ask())[0] == 503  # may be tried again


async def test_a_bug_in_a_handler_is_logged_and_survived(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request) -> Response:
        if not request.body:
            raise KeyError("a bug")
        return await echo(request)

    client = FakeClient(connect(fail))
    status, _, body = await client.ask()
    assert (status, json.loads(body)["error"]["type"]) == (500, "InternalError")
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (logging.ERROR, "http.handler_failed")
    ]
    assert caplog.records[0].exc_info
    assert (await client.ask(body=b"still here"))[2] == b"still here"


async def test_an_answer_that_is_no_http_ends_its_connection_only(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def bad_header(_: Request) -> Response:
        headers = (("x", "line\nbreak"),)
        return Response(status=200, content_type="text/plain", body=b"", headers=headers)

    stream = connect(bad_header)
    await FakeClient(stream).send()
    assert await read_all(stream) == b""
    assert [record.message for record in caplog.records] == ["http.connection_failed"]


@given(st.lists(st.binary(max_size=60) | st.sampled_from([
    b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\nhost: h\r\n", b"content-length: 3\r\n", b"\r\n",
    b"transfer-encoding: chunked\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"CONNECT h:1 HTTP/1.1\r\n",
    b"expect: 100-continue\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n",
]), max_size=8))  # fmt: skip
async def test_any_bytes_end_in_answers_or_a_close(chunks: list[bytes]) -> None:
    async def no_route(_: Request) -> Response:
        return http1.error_response(404, "no", kind="NotFoundError", hop="test")

    client, server = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(http1.serve_connection, server, no_route, hop="test"))
        for chunk in chunks:
            await client.send_all(chunk)
        await client.send_eof()
        answers = await read_all(client)
    assert answers == b"" or answers.startswith(b"HTTP/1.1 ")


# --- over sockets --------------------------------------------------------------------------------


async def test_many_connections_at_once(nursery: trio.Nursery) -> None:
    waiting = 0
    everyone = trio.Event()

    async def meet(request: Request) -> Response:
        nonlocal waiting
        waiting += 1
        if waiting == 300:
            everyone.set()
        await everyone.wait()
        return await echo(request)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
    nursery.start_soon(partial(http1.serve, listeners, meet, hop="test"))
    port = listeners[0].socket.getsockname()[1]
    answers = []

    async def ask(number: int) -> None:
        body = b"%d" % number
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            client = FakeClient(stream)
            first, second = await client.ask(body=body), await client.ask(body=body)
            answers.append((first[2], second[2]) == (body, body))

    async with trio.open_nursery() as clients:
        for number in range(300):
            clients.start_soon(ask, number)
    assert answers == [True] * 300
    nursery.cancel_scope.cancel()


async def test_a_refused_sender_gets_its_answer(nursery: trio.Nursery) -> None:
    """Closing a socket with unread bytes would reset it and take the answer away."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(
        partial(http1.serve, listeners, echo, hop="test", limits=Limits(body_bytes=1000))
    )
    port = listeners[0].socket.getsockname()[1]
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        status, _, _ = await FakeClient(stream).ask(body=b"x" * 4_000_000)
    assert status == 413
    nursery.cancel_scope.cancel()
