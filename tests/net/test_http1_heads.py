"""What is taken for plain is what h11 reads; all else is left to it."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncgrpo_agent.net.http1_heads import read_head, write_head

PLAIN = b"POST /a?b=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nX:  y z \r\n\r\n"
PIECES = st.sampled_from([
    b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"PUT / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n",
    b"GET http://h/ HTTP/1.1\r\n", b"Host: h\r\n", b"host:h\r\n", b"Content-Length: 3\r\n",
    b"content-length: 03\r\n", b"content-length: +3\r\n", b"content-length: 3, 3\r\n",
    b"Content-Length: \r\n", b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n",
    b"connection: close\r\n", b"upgrade: x\r\n", b" folded\r\n", b"x : y\r\n", b"x: \xff\r\n",
    b"x: a\rb\r\n", b"x: \t y\r\n", b"\r\n", b"\n", b"abc",
])  # fmt: skip


def test_a_plain_head() -> None:
    head = read_head(PLAIN + b"abc", 1000)
    assert head is not None
    assert (head.method, head.target) == ("POST", "/a?b=1")
    assert head.headers == {"host": "h", "content-length": "3", "x": "y z"}
    assert (head.head_bytes, head.body_bytes) == (len(PLAIN), 3)


@pytest.mark.parametrize("size_bytes", range(len(PLAIN)))
def test_a_head_that_is_not_whole_is_not_plain(size_bytes: int) -> None:
    assert read_head(PLAIN[:size_bytes], 1000) is None


def test_a_head_over_the_limit_is_not_plain() -> None:
    assert read_head(PLAIN, len(PLAIN)) is not None
    assert read_head(PLAIN, len(PLAIN) - 1) is None


@given(st.lists(PIECES, max_size=7).map(b"".join))
@example(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
def test_h11_reads_the_same(data: bytes) -> None:
    head = read_head(data, 1000)
    if head is None:
        return
    peer = h11.Connection(our_role=h11.SERVER)
    peer.receive_data(data[: head.head_bytes] + bytes(head.body_bytes))
    request = peer.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method.decode(), request.target.decode()) == (head.method, head.target)
    assert {name.decode(): value.decode() for name, value in request.headers} == head.headers
    body_bytes = 0
    while isinstance(event := peer.next_event(), h11.Data):
        body_bytes += len(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert body_bytes == head.body_bytes
    assert not peer.trailing_data[0]


def test_the_head_of_an_answer() -> None:
    client = h11.Connection(our_role=h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    headers = [("content-type", "a/b; c=d"), ("content-length", "0"), ("x", "")]
    client.receive_data(write_head(404, headers))
    answer = client.next_event()
    assert isinstance(answer, h11.Response)
    assert answer.status_code == 404
    sent = [(name.encode(), value.encode()) for name, value in headers]
    assert list(answer.headers) == sent


@pytest.mark.parametrize(
    "header", [("x", "a\r\nb"), ("x", "a\0"), ("x\n", "a"), ("x", " a"), ("", "a")]
)
def test_headers_that_a_client_could_misread_are_not_sent(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        write_head(200, [header])
