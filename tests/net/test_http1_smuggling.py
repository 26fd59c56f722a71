"""Requests about whose end a reader could be mistaken: nothing within one is taken for another."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import memory_stream_pair

from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.http1 import Request, Response

HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: h\r\n\r\n"
POST = b"POST /open HTTP/1.1\r\nhost: h\r\n"
CHUNKS = b"\r\n0\r\n\r\n"


def longer(*lines: bytes) -> bytes:
    """A head whose reader may think the body is empty, or `HIDDEN`."""
    return POST + b"".join(line + b"\r\n" for line in lines)


LENGTH = b"content-length: %d" % len(HIDDEN)
NONE = b"content-length: 0"
CHUNKED = b"transfer-encoding: chunked"
ATTACKS = {
    "a length and chunks": longer(LENGTH, CHUNKED) + CHUNKS,
    "chunks and a length": longer(CHUNKED, LENGTH) + CHUNKS,
    "no length and chunks": longer(NONE, CHUNKED) + CHUNKS,
    "two lengths": longer(NONE, LENGTH) + b"\r\n",
    "two lengths, the other way": longer(LENGTH, NONE) + b"\r\n",
    "two lengths in a line": longer(b"content-length: 0, %d" % len(HIDDEN)) + b"\r\n",
    "a sign": longer(b"content-length: +0") + b"\r\n",
    "below nothing": longer(b"content-length: -1") + b"\r\n",
    "hexadecimal": longer(b"content-length: 0x0") + b"\r\n",
    "a fraction": longer(b"content-length: 0.0") + b"\r\n",
    "no number": longer(b"content-length: ") + b"\r\n",
    "digits of another script": longer("content-length: \u0660".encode()) + b"\r\n",
    "a number of 5,000 digits": longer(b"content-length: " + b"9" * 5_000) + b"\r\n",
    "a number of 5,000 zeros": longer(b"content-length: " + b"0" * 5_000) + b"\r\n",
    "a space before the colon": longer(b"content-length : 0") + b"\r\n",
    "a folded line": longer(b"x: y", b" content-length: 0", NONE + b"\r\n 0") + b"\r\n",
    "a bare CR": longer(b"x: y\rcontent-length: 0") + b"\r\n",
    "NUL": longer(b"x: \0", NONE) + b"\r\n",
    "chunks twice": longer(b"transfer-encoding: chunked, chunked") + CHUNKS,
    "chunks, then something": longer(b"transfer-encoding: chunked, identity") + CHUNKS,
    "hardly chunks": longer(b"transfer-encoding: xchunked") + CHUNKS,
    "chunks after a vertical tab": longer(b"transfer-encoding: \x0bchunked") + CHUNKS,
    "two transfer encodings": longer(CHUNKED, b"transfer-encoding: identity") + CHUNKS,
    "chunks in HTTP/1.0": b"POST /open HTTP/1.0\r\nhost: h\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "a chunk of a signed size": longer(CHUNKED) + b"\r\n+0\r\n\r\n",
    "a chunk below nothing": longer(CHUNKED) + b"\r\n-1\r\n\r\n",
    "a chunk of 0x0": longer(CHUNKED) + b"\r\n0x0\r\n\r\n",
    "a chunk of sixteen exabytes": longer(CHUNKED) + b"\r\nffffffffffffffff\r\n",
    "a chunk of more digits than any": longer(CHUNKED) + b"\r\n" + b"f" * 5_000 + b"\r\n",
    "a chunk without its end": longer(CHUNKED) + b"\r\n1\r\nxyz0\r\n\r\n",
    "two hosts": longer(b"host: evil", NONE) + b"\r\n",
    "no host": b"POST /open HTTP/1.1\r\n" + NONE + b"\r\n\r\n",
    "no version": b"GET /open\r\n\r\n",
    "another version": b"GET /open HTTP/9.9\r\nhost: h\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space in the target": b"GET /open /x HTTP/1.1\r\nhost: h\r\n\r\n",
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_nothing_is_smuggled(nursery: trio.Nursery, name: str, pieces: int) -> None:
    seen: list[str] = []

    async def note(request: Request) -> Response:
        seen.append(request.path)
        return Response(status=200, content_type="text/plain", body=b"")

    client, server = memory_stream_pair()
    nursery.start_soon(partial(http1.serve_connection, server, note, hop="test"))
    data, answers = ATTACKS[name] + HIDDEN, b""
    with trio.fail_after(20):
        with suppress(trio.BrokenResourceError):  # refused before it had sent all
            for start in range(0, len(data), -(-len(data) // pieces)):
                await client.send_all(data[start : start - (-len(data) // pieces)])
                await trio.testing.wait_all_tasks_blocked()
            await client.send_eof()
        while part := await client.receive_some(65536):
            answers += part
    assert seen == []
    assert answers == b"" or answers.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501 "))
    assert answers.count(b"HTTP/1.1 ") <= 1


@pytest.mark.parametrize(
    ("sent", "paths"),
    [
        (longer(LENGTH) + b"\r\n" + HIDDEN, ["/open"]),
        (longer(LENGTH, LENGTH) + b"\r\n" + HIDDEN, ["/open"]),
        (longer(CHUNKED) + b'\r\n%x;x="\n' % len(HIDDEN) + HIDDEN, []),
        (longer(CHUNKED) + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), ["/open"]),
        (longer(NONE, b"x: \n" + HIDDEN.replace(b"\r", b"")) + b"\r\n", []),
        (b"GET /open?x=%0d%0a%0d%0aGET+/hidden HTTP/1.1\r\nhost: h\r\n\r\n", ["/open"]),
        (b"GET http://evil/open HTTP/1.1\r\nhost: h\r\n\r\n", ["http://evil/open"]),
    ],
)
async def test_a_body_stays_one(nursery: trio.Nursery, sent: bytes, paths: list[str]) -> None:
    seen: list[str] = []

    async def note(request: Request) -> Response:
        seen.append(request.path)
        return Response(status=200, content_type="text/plain", body=b"")

    client, server = memory_stream_pair()
    nursery.start_soon(partial(http1.serve_connection, server, note, hop="test"))
    with trio.fail_after(20):
        await client.send_all(sent)
        await trio.testing.wait_all_tasks_blocked()
    assert seen == paths
