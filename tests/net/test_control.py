from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.net.control import (
    FROM_ACCEPTOR,
    FROM_DIALLER,
    ROLLOUT,
    ControlChannel,
    read_envelope,
)
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.wire.framing import encode
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.messages import (
    Finish,
    FromAcceptor,
    FromDialler,
    Holdings,
    Retire,
    Rollout,
)
from fakes.links import linked_pair

Dialler = ControlChannel[FromDialler, FromAcceptor]
Acceptor = ControlChannel[FromAcceptor, FromDialler]


async def idle(stream: LinkStream) -> None:
    await trio.sleep_forever()


async def test_messages_travel_both_ways_in_order(nursery: trio.Nursery) -> None:
    async def dialler(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        control: Dialler = ControlChannel(stream, FROM_ACCEPTOR)
        while True:
            message = await control.receive()
            assert isinstance(message, Retire)
            await control.send(Holdings(message.names))

    client, _ = await linked_pair(nursery, dialler)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        for number in range(20):
            await control.send(Retire([f"adapter-{number}"], []))
        for number in range(20):
            assert await control.receive() == Holdings([f"adapter-{number}"])


async def test_concurrent_and_cancelled_senders_never_mix_messages(nursery: trio.Nursery) -> None:
    received: list[FromAcceptor] = []
    read = trio.Event()
    complete = trio.Event()

    async def dialler(stream: LinkStream) -> None:
        control: Dialler = ControlChannel(stream, FROM_ACCEPTOR)
        await read.wait()
        while True:
            received.append(await control.receive())
            if received[-1] == Finish("last"):
                complete.set()

    client, _ = await linked_pair(nursery, dialler)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        async with trio.open_nursery() as senders:
            for letter in "abcdefgh":
                senders.start_soon(control.send, Retire([letter * 500_000], []))
            await wait_all_tasks_blocked()
            senders.cancel_scope.cancel()
        read.set()
        await control.send(Finish("last"))
        await complete.wait()
    assert 0 < len(received) - 1 < 8
    assert all(len(set(m.names[0])) == 1 for m in received if isinstance(m, Retire))


async def test_end_of_the_stream_is_a_link_error(nursery: trio.Nursery) -> None:
    async def dialler(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await stream.send(encode(Holdings([]))[:7])
        await stream.end()

    client, _ = await linked_pair(nursery, dialler)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        with pytest.raises(LinkError, match="far: the peer ended the stream early"):
            await control.receive()


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\x02{}", encode(Finish("of the other direction"))]
)
async def test_bad_messages_are_the_peers_fault(nursery: trio.Nursery, data: bytes) -> None:
    async def dialler(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await stream.send(data)
        await trio.sleep_forever()

    client, _ = await linked_pair(nursery, dialler)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        with pytest.raises(PeerProtocolError):
            await control.receive()


async def test_a_message_that_is_too_large_ends_no_more_than_its_link(
    nursery: trio.Nursery,
) -> None:
    client, _ = await linked_pair(nursery, idle)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        with pytest.raises(LinkError, match="Finish of 1048600 bytes is over the limit"):
            await control.send(Finish("x" * ((1 << 20) - len('{"t":"finish","reason":""}') + 24)))
        await control.send(Finish("done"))


async def test_no_more_is_kept_of_a_message_than_was_allowed(nursery: trio.Nursery) -> None:
    async def dialler(stream: LinkStream) -> None:
        control: Dialler = ControlChannel(stream, FROM_ACCEPTOR)
        await stream.respond(OK_RESPONSE)
        for size in (100, 5000, 5000):
            await control.send(Holdings(["x" * size]))
        await trio.sleep_forever()

    client, _ = await linked_pair(nursery, dialler)
    async with await client.open(CONTROL_REQUEST) as stream:
        control: Acceptor = ControlChannel(stream, FROM_DIALLER)
        control.allow(1000)
        assert await control.receive() == Holdings(["x" * 100])
        control.allow(6000)
        assert await control.receive() == Holdings(["x" * 5000])
        control.allow(1000)
        with pytest.raises(PeerProtocolError, match="at most 1000 allowed"):
            await control.receive()


async def test_envelope_and_the_body_behind_it(nursery: trio.Nursery) -> None:
    envelope = Rollout("r1", "/v1/completions", "adapter", [1, 2], 32, 64, 30.0)
    got: list[tuple[Rollout, bytes]] = []
    done = trio.Event()

    async def handler(stream: LinkStream) -> None:
        rollout, body = await read_envelope(stream, ROLLOUT)
        while data := await stream.receive():
            body += data
        got.append((rollout, body))
        done.set()

    client, _ = await linked_pair(nursery, handler)
    async with await client.open(ROLLOUT_REQUEST) as stream:
        await stream.send(encode(envelope) + b"the body")
        await stream.send(b" and more")
        await stream.end()
        await done.wait()
    assert got == [(envelope, b"the body and more")]
