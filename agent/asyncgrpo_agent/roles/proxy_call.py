"""The proxy of a join, dialled by a command as an agent dials it, for as long as it asks.

With the join's addresses and CA, through the site's HTTP proxy. The certificate proves who it is,
the token of each request who asks.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import LinkError, PeerProtocolError
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.registration import ProxyAddresses
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.limits import AUTHENTICATED

PING_S: Final = 10.0


@asynccontextmanager
async def called(config: Config, join: Join) -> AsyncIterator[Link]:
    """A link to the proxy. Raises LinkError, ConfigError."""
    link = await _dial_any(ProxyAddresses(config, join).choices(), join)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(_pump, link)
        try:
            link.authenticated(AUTHENTICATED, PING_S, PING_S)
            yield link
        except BaseException as error:  # raised below, where no nursery wraps it
            failure = error
        await link.aclose("all is done")
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _dial_any(addresses: list[str], join: Join) -> Link:
    context = tls.client_context(join.ca_der, m.ALPN_FORWARD)
    failures: list[LinkError] = []
    for address in addresses:
        try:
            return await dial(
                address,
                context=context,
                server_name=tls.SERVER_NAME,
                alpn=m.ALPN_FORWARD,
                client=True,
                environ=dict(os.environ),
            )
        except LinkError as error:
            failures.append(error)
    first = failures[0]
    others = "".join(f"; {error.where}: {error.what}" for error in failures[1:])
    fix = first.fix or "See whether the proxy runs, and give --proxy HOST:PORT if it has moved"
    raise LinkError(first.what + others, where=first.where, fix=fix)


async def _pump(
    link: Link, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with suppress(LinkError):  # whoever waits for an answer gets it too
        await link.run(_refuse_stream, task_status=task_status)


async def _refuse_stream(stream: LinkStream) -> None:
    """The proxy is the HTTP/2 server here and cannot open streams."""
    raise PeerProtocolError("the proxy opened a stream")
