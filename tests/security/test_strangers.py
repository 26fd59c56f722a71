"""Strangers at the port of a whole proxy, and what they must not reach."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, OK_RESPONSE
from fakes import fleet
from fakes.fleet import Agent, Site

pytestmark = pytest.mark.slow

DEEP = 7_000
PATIENCE_S = 20.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def join_of(site: Site) -> Join:
    return decode((site.folder / "replica.join").read_text())


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BOMBS = [
    b'{"type":"Hello","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"x":' * 2_000 + b"1" + b"}" * 2_000,
    b"[" * 2 * DEEP,
    b'{"type":"Hello","protocol":' + b"9" * DEEP + b"}",
    b'{"type":"Hello","protocol":1e999}',
    b'{"type":"Hello","name":"\\ud800"}',
    b"\xff" * DEEP,
]


async def arrive(site: Site, alpn: str) -> Link:
    return await dial(
        site.address,
        context=tls.client_context(join_of(site).ca_der, alpn),
        server_name=tls.SERVER_NAME,
        alpn=alpn,
        client=alpn == m.ALPN_FORWARD,
        environ={},
    )


async def say(site: Site, alpn: str, words: bytes) -> None:
    """Say that in place of a hello; over when the proxy has ended the link."""
    link = await arrive(site, alpn)

    async def answer(stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        await stream.send(words)
        await trio.sleep_forever()

    async def ask() -> None:
        async with await link.open(CONTROL_REQUEST) as stream:
            await stream.send(words)
            await stream.response()
            while await stream.receive():
                pass

    with trio.fail_after(PATIENCE_S):
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.run, answer)
                if alpn == m.ALPN_FORWARD:
                    nursery.start_soon(ask)
        except* LinkError:
            pass


def is_at_work(proxy: Agent) -> bool:
    return proxy.process.poll() is None and "Traceback" not in proxy.text()


@pytest.mark.parametrize("alpn", [m.ALPN_FORWARD, m.ALPN_REVERSED])
def test_a_hello_that_is_a_bomb_ends_its_own_link_only(site: Site, alpn: str) -> None:
    proxy = site.proxy()
    for bomb in BOMBS:
        trio.run(say, site, alpn, framed(bomb))
        assert is_at_work(proxy), proxy.text()
    replica = site.replica("r1")
    replica.wait_for("link.up")
    assert replica.end() == 0
