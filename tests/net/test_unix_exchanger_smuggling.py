"""A server whose answers could be read in two ways: no byte of one counts for the next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio import socket

from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.exchanges import Answer, AnswerTooLargeError, NoAnswerError
from asyncgrpo_agent.net.unix_exchanger import UnixExchanger

HIDDEN = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 6\r\n\r\nhidden"
FINE = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\n"
ATTACKS = {
    "a length and chunks": b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: 65\r\n\r\n",
    "two lengths in a line": b"content-length: 0, 65\r\n\r\n",
    "a sign": b"content-length: +0\r\n\r\n",
    "below nothing": b"content-length: -1\r\n\r\n",
    "a number of 5,000 digits": b"content-length: " + b"9" * 5_000 + b"\r\n\r\n",
    "a space before the colon": b"content-length : 0\r\n\r\n",
    "a folded line": b"x: y\r\n content-length: 0\r\ncontent-length: 0\r\n\r\n",
    "a bare CR": b"x: y\rcontent-length: 0\r\n\r\n",
    "no body, and one": b"content-length: 0\r\n\r\n",
    "hardly chunks": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a chunk below nothing": b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk of more digits than any": b"transfer-encoding: chunked\r\n\r\n"
    + b"f" * 5_000
    + b"\r\n",
    "a chunk without its end": b"transfer-encoding: chunked\r\n\r\n1\r\nxyz0\r\n\r\n",
    "headers without end": b"x: y\r\n" * 20_000,
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[UnixExchanger]:
    made = UnixExchanger(str(tmp_path / "sock"))
    yield made
    await made.aclose()


async def serve(folder: Path, nursery: trio.Nursery, first: bytes) -> None:
    """`first` answers the first request, all others are answered well."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listener.bind(str(folder / "sock"))
    listener.listen()
    answers = [first]

    async def serve_one(stream: trio.SocketStream) -> None:
        async with stream:
            while await stream.receive_some():
                try:
                    await stream.send_all(answers.pop() if answers else FINE)
                except trio.BrokenResourceError:
                    return

    await nursery.start(trio.serve_listeners, serve_one, [trio.SocketListener(listener)])


async def ask(client: UnixExchanger) -> Answer:
    with trio.fail_after(20):
        return await client.exchange("POST", "/x", [("host", "vllm")], b"")


@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_is_left_for_the_next(
    tmp_path: Path, client: UnixExchanger, nursery: trio.Nursery, name: str
) -> None:
    await serve(tmp_path, nursery, HEAD + ATTACKS[name] + HIDDEN)
    with suppress(NoAnswerError):
        assert b"hidden" not in (await ask(client)).body
    for _ in range(3):
        assert await ask(client) == Answer(200, "a/b", b"ok")


@pytest.mark.parametrize("size", [b"content-length: 70000000\r\n\r\n", b"\r\n"])
async def test_an_answer_without_end_is_cut(
    tmp_path: Path,
    client: UnixExchanger,
    nursery: trio.Nursery,
    size: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "MAX_ANSWER_BYTES", 1 << 20)
    await serve(tmp_path, nursery, HEAD + size + bytes(3 << 20))
    with pytest.raises(AnswerTooLargeError):
        await ask(client)
    assert await ask(client) == Answer(200, "a/b", b"ok")
