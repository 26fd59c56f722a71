import socket

import pytest
import trio
import trio.testing

from asyncgrpo_agent.net.socket_stream import DirectStream

LARGE = bytes(range(256)) * 16_384  # 4 MiB: more than any socket takes at once


def pair() -> tuple[DirectStream, DirectStream]:
    ends = socket.socketpair()
    near, far = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in ends)
    return DirectStream(near), DirectStream(far)


async def read_all(stream: DirectStream, max_bytes: int | None = None) -> bytes:
    data = bytearray()
    while part := await stream.receive_some(max_bytes):
        data += part
    return bytes(data)


@pytest.mark.parametrize("max_bytes", [None, 1_000, 256 << 10, 1 << 20])
async def test_large_data_goes_through_whole(max_bytes: int | None) -> None:
    near, far = pair()
    received: list[bytes] = []

    async def receive() -> None:
        received.append(await read_all(far, max_bytes))

    async with near, far, trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await near.send_all(LARGE)
        await near.send_eof()
    assert received == [LARGE]


async def test_what_was_read_stays_as_it_was_when_more_is_read() -> None:
    near, far = pair()
    async with near, far:
        await near.send_all(b"first")
        first = await far.receive_some(256 << 10)
        await near.send_all(b"other")
        assert (first, await far.receive_some(256 << 10)) == (b"first", b"other")


async def test_a_peer_that_never_stops_lets_others_work() -> None:
    near, far = pair()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with near, far, trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await near.send_all(b"x" * 32)
        turns = 0
        for _ in range(32):
            assert await far.receive_some(1) == b"x"
        assert turns >= 5
        nursery.cancel_scope.cancel()


async def test_cancelling_a_read_loses_nothing() -> None:
    near, far = pair()
    async with near, far:
        with trio.move_on_after(0):
            await far.receive_some()
        await near.send_all(b"x")
        assert await far.receive_some() == b"x"


async def test_a_peer_that_is_gone() -> None:
    near, far = pair()
    async with near:
        await far.aclose()
        assert await near.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError, match="Broken pipe"):
            await near.send_all(b"x")


async def test_after_closing_nothing_touches_a_number_that_is_anothers() -> None:
    near, far = pair()
    async with far:
        await near.aclose()
        for use in (near.receive_some, near.wait_send_all_might_not_block):
            with pytest.raises(trio.ClosedResourceError):
                await use()
        with pytest.raises(trio.ClosedResourceError):
            await near.send_all(b"x")


async def test_closing_ends_a_read_that_waits() -> None:
    near, far = pair()

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await near.receive_some()

    async with far, trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()
