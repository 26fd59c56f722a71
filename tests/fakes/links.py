"""Two ends of one link over memory, pumped in a test's nursery."""

from __future__ import annotations

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_pair

from asyncgrpo_agent.net.link import Handler, Link, LinkStream
from asyncgrpo_agent.wire.headers import OK_RESPONSE
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH
from asyncgrpo_agent.wire.session import Session

MemoryStream = trio.StapledStream[MemorySendStream, MemoryReceiveStream]


async def refuse(stream: LinkStream) -> None:
    """The handler of a side that takes no streams."""
    raise AssertionError(f"stream {stream.stream_id} was not expected")


async def echo(stream: LinkStream) -> None:
    async with stream:
        await stream.respond(OK_RESPONSE)
        while data := await stream.receive():
            await stream.send(data)
        await stream.end()


def unstarted_pair() -> tuple[Link, Link, tuple[MemoryStream, MemoryStream]]:
    """An HTTP/2 client and server, and the streams below them."""
    near, far = memory_stream_pair()
    client = Link(near, Session(client=True, limits=PRE_AUTH, now=trio.current_time()), peer="far")
    server = Link(far, Session(client=False, limits=PRE_AUTH, now=trio.current_time()), peer="near")
    return client, server, (near, far)


async def linked_pair(nursery: trio.Nursery, handler: Handler = echo) -> tuple[Link, Link]:
    """A running, authenticated pair: `handler` serves what the client opens."""
    client, server, _ = unstarted_pair()
    await nursery.start(client.run, refuse)
    await nursery.start(server.run, handler)
    for link in (client, server):
        link.authenticated(AUTHENTICATED, 10.0, 10.0)
    return client, server
