"""Answers of every shape from a server on a Unix socket, and what becomes of its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio import socket
from trio.testing import MockClock

from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.exchanges import (
    Answer,
    AnswerTooLargeError,
    ClosedEarlyError,
    NoAnswerError,
)
from asyncgrpo_agent.net.unix_exchanger import KEEP_S, MAX_IDLE, UnixExchanger

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n"
    b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
UNTIL_THE_END = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\n\r\nok"
CLOSING = PLAIN.replace(b"content-type", b"connection: close\r\ncontent-type")
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
OK = Answer(200, "a/b", b"ok")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sock"


@pytest.fixture
async def client(path: Path) -> AsyncIterator[UnixExchanger]:
    made = UnixExchanger(str(path))
    yield made
    await made.aclose()


async def serve(
    path: Path, nursery: trio.Nursery, script: Callable[[trio.SocketStream], Awaitable[None]]
) -> list[trio.SocketStream]:
    """Runs `script` for every connection and closes it; gives the growing list of them."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listener.bind(str(path))
    listener.listen()
    seen: list[trio.SocketStream] = []

    async def serve_one(stream: trio.SocketStream) -> None:
        seen.append(stream)
        async with stream:
            await script(stream)

    await nursery.start(trio.serve_listeners, serve_one, [trio.SocketListener(listener)])
    return seen


def answering(*answers: bytes) -> Callable[[trio.SocketStream], Awaitable[None]]:
    """One answer to each request, a byte at a time."""

    async def script(stream: trio.SocketStream) -> None:
        for answer in answers:
            if not await stream.receive_some():
                return
            for at in range(len(answer)):
                await stream.send_all(answer[at : at + 1])

    return script


async def ask(client: UnixExchanger, body: bytes = b"") -> Answer:
    with trio.fail_after(20):
        return await client.exchange("POST", "/x", [("host", "vllm")], body)


@pytest.mark.parametrize(
    ("answer", "expected", "kept"),
    [
        (PLAIN, OK, True),
        (CHUNKED, OK, True),
        (CONTINUED, OK, True),
        (EMPTY, Answer(204, "", b""), True),
        (CLOSING, OK, False),
        (UNTIL_THE_END, OK, False),
    ],
)
async def test_any_answer_is_read(
    path: Path,
    client: UnixExchanger,
    nursery: trio.Nursery,
    answer: bytes,
    expected: Answer,
    kept: bool,
) -> None:
    seen = await serve(path, nursery, answering(answer, answer) if kept else answering(answer))
    assert await ask(client) == expected
    assert await ask(client) == expected
    assert len(seen) == (1 if kept else 2)


async def test_more_than_the_answer_ends_the_connection(
    path: Path, client: UnixExchanger, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(PLAIN + PLAIN)
        await stream.receive_some()

    seen = await serve(path, nursery, script)
    assert [await ask(client), await ask(client)] == [OK, OK]
    assert len(seen) == 2


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-x\r\n\r\n", PLAIN[:-1], CHUNKED[:-4], UNTIL_THE_END[:30]]
)
async def test_what_is_no_whole_answer_is_none(
    path: Path, client: UnixExchanger, nursery: trio.Nursery, answer: bytes
) -> None:
    await serve(path, nursery, answering(answer))
    with pytest.raises(NoAnswerError) as caught:
        await ask(client)
    assert caught.value.sent


async def test_an_end_before_the_answer_tells_whether_the_connection_was_fresh(
    path: Path, client: UnixExchanger, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream) -> None:
        if await stream.receive_some():
            await stream.send_all(PLAIN)
            await stream.receive_some()

    await serve(path, nursery, script)
    assert await ask(client) == OK
    with pytest.raises(ClosedEarlyError) as caught:
        await ask(client)
    assert not caught.value.fresh


async def test_nobody_there(client: UnixExchanger) -> None:
    with pytest.raises(NoAnswerError, match="No such file") as caught:
        await ask(client)
    assert not caught.value.sent


async def test_a_refusal_that_did_not_wait_for_the_body_is_an_answer(
    path: Path, client: UnixExchanger, nursery: trio.Nursery
) -> None:
    async def script(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(PLAIN)

    await serve(path, nursery, script)
    assert await ask(client, b"x" * 4_000_000) == OK


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
async def test_an_answer_over_the_limit_is_cut(
    path: Path,
    client: UnixExchanger,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
) -> None:
    monkeypatch.setattr(exchanges, "MAX_ANSWER_BYTES", 1)
    await serve(path, nursery, answering(answer))
    with pytest.raises(AnswerTooLargeError, match="limit of 1 bytes"):
        await ask(client)


async def test_cancelling_closes_the_connection(
    path: Path, client: UnixExchanger, nursery: trio.Nursery
) -> None:
    gone = trio.Event()

    async def script(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        assert await stream.receive_some() == b""
        gone.set()

    await serve(path, nursery, script)
    with trio.move_on_after(0.05):
        await client.exchange("POST", "/x", [("host", "vllm")], b"")
    with trio.fail_after(20):
        await gone.wait()


async def test_an_old_connection_is_not_used_again(
    path: Path, client: UnixExchanger, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    seen = await serve(path, nursery, answering(PLAIN, PLAIN))
    await ask(client)
    await trio.sleep(KEEP_S)
    await ask(client)
    assert len(seen) == 2


async def test_few_connections_are_kept(
    path: Path, client: UnixExchanger, nursery: trio.Nursery
) -> None:
    closed = 0
    started = trio.Event()

    async def script(stream: trio.SocketStream) -> None:
        nonlocal closed
        await stream.receive_some()
        if len(seen) == MAX_IDLE + 2:
            started.set()
        await started.wait()  # all at once, so that each needs a connection of its own
        await stream.send_all(PLAIN)
        await stream.receive_some()
        closed += 1

    seen = await serve(path, nursery, script)
    async with trio.open_nursery() as rollouts:
        for _ in range(MAX_IDLE + 2):
            rollouts.start_soon(ask, client)
    await client.aclose()
    with trio.fail_after(20):
        while closed < MAX_IDLE + 2:
            await trio.lowlevel.checkpoint()
