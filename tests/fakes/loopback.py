"""A listening proxy on loopback TLS, and agents that dial it, in a test's nursery."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import trio

from asyncgrpo_agent.net.accept import PROTOCOLS, LinkHandler, serve_links
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.tls import SERVER_NAME
from asyncgrpo_agent.wire.messages import ALPN_FORWARD, ALPN_REVERSED
from fakes.certificates import agent_context, proxy_context


async def listen(
    nursery: trio.Nursery,
    handler: LinkHandler,
    *,
    strangers_of_address: int = 32,
    strangers_in_all: int = 512,
) -> str:
    """Serve links; gives the address to dial."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    serve = partial(
        serve_links,
        strangers_of_address=strangers_of_address,
        strangers_in_all=strangers_in_all,
    )
    await nursery.start(serve, listeners, proxy_context(PROTOCOLS), handler)
    return f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"


async def dial_reversed(address: str, environ: Mapping[str, str] | None = None) -> Link:
    """As a replica does: the dialler serves streams."""
    return await dial(
        address,
        context=agent_context(ALPN_REVERSED),
        server_name=SERVER_NAME,
        alpn=ALPN_REVERSED,
        client=False,
        environ=environ or {},
    )


async def dial_forward(address: str, environ: Mapping[str, str] | None = None) -> Link:
    """As a trainer does: the dialler opens streams."""
    return await dial(
        address,
        context=agent_context(ALPN_FORWARD),
        server_name=SERVER_NAME,
        alpn=ALPN_FORWARD,
        client=True,
        environ=environ or {},
    )
