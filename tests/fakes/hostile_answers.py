"""Answers of HTTP/1.1 that could be read in two ways, and servers that send them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
import trio.testing

HIDDEN: Final = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 6\r\n\r\nhidden"
FINE: Final = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 2\r\n\r\nok"
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\n"
ATTACKS: Final = {
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
    "a header without end": b"x: " + b"y" * 200_000,
    "bare LF": b"content-length: 0\n\n",
    "bare LF in a header": b"x: y\ncontent-length: 0\r\n\r\n",
    "NUL in a header": b"x: y\0z\r\ncontent-length: 0\r\n\r\n",
    "a length in hex": b"content-length: 0x2\r\n\r\nok",
    "chunks, twice": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n0\r\n\r\n",
    "chunks that are zipped": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a chunk's extension": b"transfer-encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\n\r\n",
    "an extension without end": b"transfer-encoding: chunked\r\n\r\n2;" + b"x" * 200_000,
    "an extension with a bare LF": b"transfer-encoding: chunked\r\n\r\n0;x\n\r\n\r\n",
    "a trailer with a length": b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 65\r\n\r\n",
}
# What is sent before or in place of an answer, whole by itself.
STARTS: Final = {
    "interim answers": b"HTTP/1.1 100 \r\n\r\n" * 50_000,
    "hints": b"HTTP/1.1 103 \r\nlink: </x>\r\n\r\n" * 50_000,
    "another protocol": b"HTTP/1.1 101 \r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "no protocol": b"ok\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\ncontent-length: 0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
    "an empty line": b"\r\n\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    "two status lines": b"HTTP/1.1 200 OK\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
}
PAUSE_S: Final = 0.05  # between an answer and what comes late
INJECTED: Final = ["x\r\ny: z", "x\ny: z", "x\ry", "x\0y"]
Handler = Callable[[trio.SocketStream], Awaitable[None]]


def answering(first: bytes, requests: list[bytes], late: Sequence[bytes] = ()) -> Handler:
    """`first` answers the first request, all others are answered well. `late` comes after an
    answer, when nobody has asked for anything."""
    answers = [first]
    unasked = list(late)

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                while data := await stream.receive_some():
                    requests.append(data)
                    await stream.send_all(answers.pop() if answers else FINE)
                    if unasked:
                        await trio.testing.wait_all_tasks_blocked(PAUSE_S)
                        await stream.send_all(unasked.pop())
            except trio.BrokenResourceError:
                return

    return serve
