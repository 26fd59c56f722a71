"""The whole of a link over real loopback TLS: dial, accept, ALPN, control stream, rollouts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import trio

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import (
    FROM_ACCEPTOR,
    FROM_DIALLER,
    ControlChannel,
)
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE, ROLLOUT_REQUEST, path_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from asyncgrpo_agent.wire.messages import (
    ALPN_REVERSED,
    CONTROL_PATH,
    Accepted,
    FromAcceptor,
    FromDialler,
    Hello,
)
from fakes.certificates import authority, proxy_context
from fakes.connect_proxy import FakeConnectProxy, basic
from fakes.links import echo, refuse
from fakes.loopback import dial_forward, dial_reversed, listen

HELLO = Hello(
    protocol=1,
    role="replica",
    run="run",
    name="replica-1",
    instance="i",
    agent_version="0",
    token="t",
    capacity=256,
)
ACCEPTED = Accepted("replica-1", "a0001-0000", 10.0, 10.0)


async def serve_replica(link: Link) -> None:
    """The replica's side: say hello on the control stream, echo every other stream."""

    async def handler(stream: LinkStream) -> None:
        if path_of(stream.request_headers) != CONTROL_PATH:
            await echo(stream)
            return
        control: ControlChannel[FromDialler, FromAcceptor] = ControlChannel(stream, FROM_ACCEPTOR)
        await stream.respond(OK_RESPONSE)
        await control.send(HELLO)
        assert await control.receive() == ACCEPTED
        link.authenticated(AUTHENTICATED, ACCEPTED.ping_s, ACCEPTED.ping_deadline_s)
        await trio.sleep_forever()

    with suppress(LinkError):
        await link.run(handler)


async def rollout(link: Link, seed: int) -> None:
    """Send a body of random size while the answer comes back, and compare."""
    rng = Random(seed)
    body = rng.randbytes(rng.choice((0, 1, 1_500, 20_000, 300_000)))
    received = bytearray()
    async with await link.open(ROLLOUT_REQUEST) as stream, trio.open_nursery() as nursery:

        async def upload() -> None:
            await stream.send(body)
            await stream.end()

        nursery.start_soon(upload)
        assert await stream.response() == OK_RESPONSE
        while data := await stream.receive():
            received += data
    assert received == body


async def test_replica_registers_and_takes_200_rollouts_at_once(nursery: trio.Nursery) -> None:
    done = trio.Event()

    async def handler(link: Link, alpn: str, peer: str) -> None:
        assert alpn == ALPN_REVERSED
        async with trio.open_nursery() as inner:
            inner.start_soon(link.run, refuse)
            async with await link.open(CONTROL_REQUEST) as stream:
                assert await stream.response() == OK_RESPONSE
                control: ControlChannel[FromAcceptor, FromDialler] = ControlChannel(
                    stream, FROM_DIALLER
                )
                assert await control.receive() == HELLO
                link.authenticated(AUTHENTICATED, ACCEPTED.ping_s, ACCEPTED.ping_deadline_s)
                await control.send(ACCEPTED)
                async with trio.open_nursery() as rollouts:
                    for seed in range(200):
                        rollouts.start_soon(rollout, link, seed)
                assert link.open_streams == 1
            await link.aclose("test is over")
        done.set()

    address = await listen(nursery, handler)
    replica = await dial_reversed(address)
    nursery.start_soon(serve_replica, replica)
    with trio.fail_after(30):
        await done.wait()


async def serve_echo(link: Link, alpn: str, peer: str) -> None:
    await link.run(echo)


def through(proxy: FakeConnectProxy, password: str) -> dict[str, str]:
    scheme = "http" if proxy.context is None else "https"
    return {"HTTPS_PROXY": f"{scheme}://user:{password}@127.0.0.1:{proxy.port}"}


async def start_proxy(nursery: trio.Nursery, *, tls: bool = False) -> FakeConnectProxy:
    proxy = FakeConnectProxy(basic("user:p@ss"), proxy_context(()) if tls else None)
    await nursery.start(proxy.run)
    return proxy


@pytest.mark.parametrize("tls", [False, True])
async def test_link_through_a_connect_proxy(
    nursery: trio.Nursery, tmp_path: Path, tls: bool
) -> None:
    address = await listen(nursery, serve_echo)
    proxy = await start_proxy(nursery, tls=tls)
    (tmp_path / "ca.pem").write_bytes(authority()[0])
    environ = {**through(proxy, "p%40ss"), "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    link = await dial_forward(address, environ)
    async with trio.open_nursery() as inner:
        inner.start_soon(link.run, refuse)
        await rollout(link, seed=7)
        await link.aclose("done")
    assert proxy.targets == [address]


async def test_refused_password_at_the_connect_proxy_is_named(nursery: trio.Nursery) -> None:
    proxy = await start_proxy(nursery)
    with pytest.raises(LinkError, match="407") as caught:
        await dial_forward("proxy.example:7843", through(proxy, "wrong"))
    assert "wrong" not in str(caught.value)
    assert proxy.targets == []


async def test_http_proxy_that_cannot_be_reached_is_named() -> None:
    environ = {"HTTPS_PROXY": "https://user:p@127.0.0.1:1"}
    with pytest.raises(LinkError, match=r"HTTP proxy 127\.0\.0\.1:1: cannot connect: .*refused"):
        await dial_forward("proxy.example:7843", environ)


async def test_refused_connections_are_named() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(LinkError, match=rf"127\.0\.0\.1:{port}: cannot connect: .*refused"):
        await dial_forward(f"127.0.0.1:{port}")


async def test_names_that_do_not_resolve_are_named() -> None:
    with pytest.raises(LinkError, match=r"no-such-host\.invalid:1: cannot connect"):
        await dial_forward("no-such-host.invalid:1")
