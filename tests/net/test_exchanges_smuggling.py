"""A server whose answers could be read in two ways: no byte of one counts for the next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpcore
import pytest
import trio
import trio.testing
from trio import socket

from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.exchanges import Answer, AnswerTooLargeError, NoAnswerError
from asyncgrpo_agent.net.pool_exchanger import PoolExchanger
from asyncgrpo_agent.net.unix_exchanger import UnixExchanger
from fakes.hostile_answers import (
    ATTACKS,
    FINE,
    HEAD,
    HIDDEN,
    INJECTED,
    PAUSE_S,
    STARTS,
    Handler,
    answering,
)

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
Client = PoolExchanger | UnixExchanger
Serve = Callable[[Handler], Awaitable[None]]


@pytest.fixture(params=["unix", "pool"])
async def near(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[list[trio.SocketListener], Client]]:
    """Where a server may listen, and a client of it: vLLM's, or that of static upstreams."""
    made: Client
    if request.param == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await listener.bind(str(tmp_path / "sock"))
        listener.listen()
        listeners = [trio.SocketListener(listener)]
        made = UnixExchanger(str(tmp_path / "sock"))
    else:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        pool = httpcore.AsyncConnectionPool(max_connections=4, keepalive_expiry=10)
        made = PoolExchanger(pool, f"http://127.0.0.1:{port}", connect_s=10)
    yield listeners, made
    await made.aclose()


@pytest.fixture
def client(near: tuple[list[trio.SocketListener], Client]) -> Client:
    return near[1]


@pytest.fixture
def serve(near: tuple[list[trio.SocketListener], Client], nursery: trio.Nursery) -> Serve:
    async def start(handler: Handler) -> None:
        await nursery.start(trio.serve_listeners, handler, near[0])

    return start


async def ask(client: Client) -> Answer:
    with trio.fail_after(20):
        return await client.exchange("POST", "/x", [("host", "vllm")], b"")


@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_is_left_for_the_next(serve: Serve, client: Client, name: str) -> None:
    await serve(answering(HEAD + ATTACKS[name] + HIDDEN, []))
    with suppress(NoAnswerError):
        assert b"hidden" not in (await ask(client)).body
    for _ in range(3):
        assert await ask(client) == Answer(200, "a/b", b"ok")


@pytest.mark.parametrize("name", STARTS)
async def test_nothing_that_comes_first_is_left_for_the_next(
    serve: Serve, client: Client, name: str
) -> None:
    await serve(answering(STARTS[name] + HIDDEN, []))
    with suppress(NoAnswerError):
        await ask(client)  # an answer after interim ones is its own
    for _ in range(3):
        assert await ask(client) == Answer(200, "a/b", b"ok")


async def test_an_answer_nobody_asked_for_is_nobodys(serve: Serve, client: Client) -> None:
    await serve(answering(FINE, [], late=[HIDDEN]))
    for _ in range(3):
        assert await ask(client) == Answer(200, "a/b", b"ok")
        await trio.testing.wait_all_tasks_blocked(2 * PAUSE_S)  # in which it arrives


async def test_a_body_that_is_cut_short_is_an_error(serve: Serve, client: Client) -> None:
    async def cut(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(HEAD + b"content-length: 10\r\n\r\nok")

    await serve(cut)
    with pytest.raises(NoAnswerError):
        await ask(client)


@pytest.mark.parametrize("endless", [b"HTTP/1.1 100 \r\n\r\n", HEAD + b"x: y\r\n", b""])
async def test_a_server_without_end_holds_nobody_beyond_the_deadline(
    serve: Serve, client: Client, endless: bytes
) -> None:
    async def go_on(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                while endless:
                    await stream.send_all(endless * 1000)
                await trio.sleep_forever()

    await serve(go_on)
    with trio.fail_after(20), suppress(NoAnswerError):
        with trio.move_on_after(0.5):
            await client.exchange("POST", "/x", [("host", "vllm")], b"")


@pytest.mark.parametrize("text", INJECTED)
@pytest.mark.parametrize("place", ["path", "name", "value"])
async def test_no_line_of_a_request_is_made_by_its_values(
    serve: Serve, client: Client, text: str, place: str
) -> None:
    requests: list[bytes] = []
    await serve(answering(FINE, requests))
    path = f"/{text}" if place == "path" else "/x"
    header = (text, "v") if place == "name" else ("h", text if place == "value" else "v")
    with suppress(NoAnswerError):
        await client.exchange("POST", path, [("host", "vllm"), header], b"")
    assert not any(b"y: z" in request.split(b"\r\n") for request in requests)
    assert not any(b"\ny: z" in request or b"\0" in request for request in requests)
    assert await ask(client) == Answer(200, "a/b", b"ok")


@pytest.mark.parametrize("size", [b"content-length: 70000000\r\n\r\n", b"\r\n"])
async def test_an_answer_without_end_is_cut(
    serve: Serve, client: Client, size: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "MAX_ANSWER_BYTES", 1 << 20)
    await serve(answering(HEAD + size + bytes(3 << 20), []))
    with pytest.raises(AnswerTooLargeError):
        await ask(client)
    assert await ask(client) == Answer(200, "a/b", b"ok")


async def test_a_connection_is_used_again_after_an_answer_and_no_more(
    serve: Serve, client: Client
) -> None:
    connections = 0

    async def count(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        await answering(CHUNKED, [])(stream)

    await serve(count)
    for _ in range(5):
        assert await ask(client) == Answer(200, "a/b", b"ok")
    assert connections == 1
