"""The stream itself; names, protocols and certificates are in test_tls."""

from __future__ import annotations

import _ssl
import ctypes
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import (
    MemoryReceiveStream,
    MemorySendStream,
    check_two_way_stream,
    lockstep_stream_pair,
    memory_stream_pair,
    memory_stream_pump,
    wait_all_tasks_blocked,
)

from asyncgrpo_agent.net.tls import SERVER_NAME, client_context
from asyncgrpo_agent.net.tls_stream import (
    MAX_ANSWER_BYTES,
    READ_BYTES,
    TlsStream,
    send_parts,
    whole_records,
)
from asyncgrpo_agent.store.certificates import make_ca
from fakes.certificates import agent_context, proxy_context, today

PROTOCOL = "h2"
RECORD_BYTES = 16 << 10
Memory = trio.StapledStream[MemorySendStream, MemoryReceiveStream]
Transports = tuple[trio.abc.Stream, trio.abc.Stream]
Sockets = tuple[TlsStream, TlsStream, "Counting"]


def ends_over(near: trio.abc.Stream, far: trio.abc.Stream) -> tuple[TlsStream, TlsStream]:
    """Client and server, before their handshake."""
    client = TlsStream(near, agent_context(PROTOCOL), server_hostname=SERVER_NAME)
    return client, TlsStream(far, proxy_context((PROTOCOL,)), server_side=True)


async def shake(*streams: TlsStream | trio.SSLStream[Memory]) -> None:
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.do_handshake)


async def connected(transports: Transports | None = None) -> tuple[TlsStream, TlsStream]:
    client, server = ends_over(*(transports or memory_stream_pair()))
    await shake(client, server)
    return client, server


@asynccontextmanager
async def connected_sockets(most_bytes: int = 1 << 20) -> AsyncIterator[Sockets]:
    """With the kernel's back-pressure, unlike memory streams."""
    near, far = (trio.SocketStream(end) for end in trio.socket.socketpair())
    counting = Counting(near, most_bytes)
    client, server = await connected((counting, far))
    try:
        yield client, server, counting
    finally:
        for stream in (client, server):
            await trio.aclose_forcefully(stream)


async def read_all(stream: trio.abc.ReceiveStream, max_bytes: int = RECORD_BYTES) -> bytes:
    received = b""
    while data := await stream.receive_some(max_bytes):
        assert len(data) <= max_bytes
        received += data
    return received


async def send_in_pieces(stream: TlsStream, body: bytes, piece_bytes: int) -> None:
    for start in range(0, len(body), piece_bytes):
        await stream.send_all(body[start : start + piece_bytes])


class Counting(trio.abc.Stream):
    """Passes bytes on, at most `most_bytes` at a time, and counts those that were taken."""

    def __init__(self, inner: trio.abc.Stream, most_bytes: int = 1 << 20) -> None:
        self._inner = inner
        self._most_bytes = most_bytes
        self.taken_bytes = 0
        self.takes = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        most_bytes = min(max_bytes or self._most_bytes, self._most_bytes)
        data = await self._inner.receive_some(most_bytes)
        self.taken_bytes += len(data)
        self.takes += 1
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_it_is_what_trio_calls_a_stream() -> None:
    async def clogged() -> tuple[TlsStream, TlsStream]:
        return await connected(lockstep_stream_pair())

    await check_two_way_stream(partial(connected, None), clogged)


async def test_both_sides_know_the_protocol() -> None:
    client, server = await connected()
    assert client.selected_alpn_protocol() == server.selected_alpn_protocol() == PROTOCOL


async def test_records_that_are_there_come_at_once() -> None:
    near, far = memory_stream_pair()
    counting = Counting(near)
    client, server = await connected((counting, far))
    for number in range(6):
        await server.send_all(bytes([number]) * 1000)
    counting.takes = 0
    assert await client.receive_some(1 << 20) == b"".join(bytes([n]) * 1000 for n in range(6))
    assert counting.takes == 1


async def test_a_large_buffer_is_sent_in_one_piece() -> None:
    class Recording(Counting):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            sent.append(len(data))
            await super().send_all(data)

    sent: list[int] = []
    near, far = memory_stream_pair()
    client, server = await connected((near, Recording(far)))
    sent.clear()
    await server.send_all(bytes(3_000_000))
    await server.aclose()
    assert len(sent) == 1
    assert await read_all(client) == bytes(3_000_000)


@given(st.lists(st.integers(0, 40_000), max_size=6))
def test_pieces_are_cut_into_as_few_records_as_if_joined(sizes: list[int]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    pieces = list(whole_records(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert all(pieces)
    assert all(len(piece) % RECORD_BYTES == 0 for piece in pieces[:-1])


async def test_parts_are_sent_in_one_piece() -> None:
    near, far = memory_stream_pair()
    client, server = await connected((near, far))
    parts = (b"head", memoryview(bytes(100_000)), bytearray(b"tail"))
    await send_parts(server, parts)
    await server.aclose()
    assert await read_all(client) == b"".join(parts)


@pytest.mark.parametrize("most_bytes", [1, 7, RECORD_BYTES + 21, 100_000])
async def test_records_come_whole_out_of_any_pieces(most_bytes: int) -> None:
    near, far = memory_stream_pair()
    client, server = await connected((Counting(near, most_bytes), far))
    body = bytes(range(256)) * min(160, 20 * most_bytes)
    await server.send_all(body)
    await server.send_all(b"end")
    await server.aclose()
    assert await read_all(client, 1 << 20) == body + b"end"


@pytest.mark.parametrize("max_bytes", [1, 1000, RECORD_BYTES - 1, RECORD_BYTES + 1])
async def test_no_more_is_handed_out_than_was_asked_for(max_bytes: int) -> None:
    client, server = await connected()
    body = bytes(range(256)) * (4 if max_bytes == 1 else 400)
    await server.send_all(body)
    await server.aclose()
    assert await read_all(client, max_bytes) == body


async def test_the_transports_end_is_the_end() -> None:
    client, server = await connected()
    await server.send_all(b"last words")
    await server.aclose()
    assert await read_all(client) == b"last words"
    assert await client.receive_some() == b""


async def test_an_end_within_a_record_is_an_end_too() -> None:
    near, far = memory_stream_pair()
    client, server = await connected((near, far))
    await server.send_all(b"whole")
    far.send_stream.send_all_hook = None
    await server.send_all(b"cut off")
    memory_stream_pump(far.send_stream, near.receive_stream, max_bytes=10)
    near.receive_stream.put_eof()
    assert await read_all(client) == b"whole"


async def test_close_notify_is_an_end_before_the_transports() -> None:
    near, far = memory_stream_pair()
    client = TlsStream(near, agent_context(PROTOCOL), server_hostname=SERVER_NAME)
    server = trio.SSLStream(far, proxy_context((PROTOCOL,)), server_side=True)
    await shake(client, server)
    await server.send_all(b"last words")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.unwrap)  # sends close_notify and waits for ours
        assert await read_all(client) == b"last words"
        assert await client.receive_some() == b""
        nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_nothing() -> None:
    body = bytes(range(256)) * 2000
    received = b""
    async with connected_sockets() as (client, server, _), trio.open_nursery() as nursery:

        async def receive(scope: trio.CancelScope) -> None:
            nonlocal received
            with scope:
                received += await client.receive_some(3000)

        nursery.start_soon(send_in_pieces, server, body, 5000)
        while len(received) < len(body):
            async with trio.open_nursery() as attempt:
                scope = trio.CancelScope()
                attempt.start_soon(receive, scope)
                await trio.lowlevel.checkpoint()
                scope.cancel()
    assert received == body


async def test_a_cancelled_send_breaks_the_stream() -> None:
    async with connected_sockets() as (client, _, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_all, bytes(10 << 20))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with pytest.raises(trio.BrokenResourceError):
            await client.send_all(b"more")


async def test_garbage_breaks_the_stream_behind_what_came_before_it() -> None:
    near, far = memory_stream_pair()
    client, server = await connected((near, far))
    await server.send_all(b"sound")
    await far.send_all(b"\x17\x03\x03\x00\x20" + b"garbage!" * 4)
    assert await client.receive_some() == b"sound"
    with pytest.raises(trio.BrokenResourceError) as caught:
        await client.receive_some()
    assert isinstance(caught.value.__cause__, ssl.SSLError)
    with pytest.raises(trio.BrokenResourceError):
        await client.send_all(b"x")


async def test_a_peer_is_told_why_the_handshake_failed() -> None:
    near, far = memory_stream_pair()
    foreign = client_context(make_ca("test run", now=today())[0], PROTOCOL)
    client = TlsStream(near, foreign, server_hostname=SERVER_NAME)
    server = TlsStream(far, proxy_context((PROTOCOL,)), server_side=True)
    causes: list[BaseException | None] = []

    async def fail(stream: TlsStream) -> None:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.do_handshake()
        causes.append(caught.value.__cause__)
        await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail, client)
        nursery.start_soon(fail, server)
    reasons = {cause.reason for cause in causes if isinstance(cause, ssl.SSLError)}
    assert "CERTIFICATE_VERIFY_FAILED" in reasons
    assert any("UNKNOWN_CA" in reason for reason in reasons)


async def test_large_bodies_both_ways_at_once() -> None:
    body = bytes(range(256)) * 20_000
    received: dict[TlsStream, bytes] = {}

    async def receive(stream: TlsStream) -> None:
        received[stream] = b""
        while len(received[stream]) < len(body):
            received[stream] += await stream.receive_some(50_000)

    async with connected_sockets() as (client, server, _):
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for stream in (client, server):
                    nursery.start_soon(send_in_pieces, stream, body, 1_000_000)
                    nursery.start_soon(receive, stream)
        assert received == {client: body, server: body}


async def test_what_is_taken_off_the_transport_is_handed_out_first() -> None:
    async with connected_sockets() as (client, server, counting), trio.open_nursery() as nursery:
        counting.taken_bytes = handed_out = 0
        nursery.start_soon(server.send_all, bytes(2 << 20))
        while handed_out < 2 << 20:
            handed_out += len(await client.receive_some(1000))
            overhead = counting.taken_bytes // 512  # of the records
            assert counting.taken_bytes - handed_out <= READ_BYTES + RECORD_BYTES + overhead


async def test_a_second_task_is_refused() -> None:
    async with connected_sockets() as (client, _, _):
        send = partial(client.send_all, bytes(10 << 20))
        calls: list[Callable[[], Awaitable[object]]] = [client.receive_some, send]
        for call in calls:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await call()
                nursery.cancel_scope.cancel()


# --- KeyUpdate, which the ssl module does not offer -------------------------------------------


library = ctypes.CDLL(_ssl.__file__)
library.SSL_key_update.argtypes = (ctypes.c_void_p, ctypes.c_int)
library.SSL_do_handshake.argtypes = (ctypes.c_void_p,)


def openssls(stream: TlsStream) -> ctypes.c_void_p:
    # In CPython's object the pointer to OpenSSL's follows the header and one other pointer.
    address = id(stream.ssl_object._sslobj) + 24  # type: ignore[attr-defined]
    return ctypes.c_void_p.from_address(address)


def ask_for_key_update(stream: TlsStream, *, answer: bool = True) -> None:
    """Have OpenSSL send a KeyUpdate ahead of the next data, one that wants an answer or not."""
    assert library.SSL_key_update(openssls(stream), answer) == 1


def key_updates(stream: TlsStream, count: int) -> bytes:
    """The records of so many, without data and without a wish for answers."""
    for _ in range(count):
        ask_for_key_update(stream, answer=False)
        assert library.SSL_do_handshake(openssls(stream)) == 1
    return stream._outgoing.read()


async def test_keys_are_changed_on_the_way() -> None:
    client, server = await connected()
    for number in range(20):
        for stream in (client, server) if number % 2 else (server, client):
            ask_for_key_update(stream)
            await stream.send_all(b"with new keys")
        assert await client.receive_some() == b"with new keys"
        assert await server.receive_some() == b"with new keys"


async def test_a_peer_that_only_makes_us_answer_is_cut_off() -> None:
    client, server = await connected()

    async def ask_for_ever() -> None:
        for _ in range(MAX_ANSWER_BYTES):
            ask_for_key_update(client)
            await client.send_all(b"x")
            assert await server.receive_some() == b"x"

    with pytest.raises(trio.BrokenResourceError):
        await ask_for_ever()


@pytest.mark.parametrize("words", [b"", b"x" * 10])
async def test_a_peer_that_hardly_sends_anything_but_key_updates_is_cut_off(words: bytes) -> None:
    near, far = memory_stream_pair()
    client, server = await connected((near, far))

    async def send_for_ever() -> None:
        for _ in range(20):
            await near.send_all(key_updates(client, 300))
            if words:
                await client.send_all(words)
                await server.receive_some()
            else:
                with trio.move_on_after(0.01):
                    await server.receive_some()

    with pytest.raises(trio.BrokenResourceError, match="hardly any data"):
        await send_for_ever()


@pytest.mark.parametrize("size", [1, 9, 100, RECORD_BYTES, 50_000])
@pytest.mark.parametrize("max_bytes", [1, 5000, READ_BYTES])
async def test_small_records_and_small_reads_are_no_waste(size: int, max_bytes: int) -> None:
    client, server = await connected()
    total = size
    for _ in range(2000 if size < 1000 else 10):
        await client.send_all(bytes(size))
        total += size
    await client.send_all(bytes(size))
    while total > 0:
        total -= len(await server.receive_some(max(max_bytes, total // 1000)))
    assert total == 0
