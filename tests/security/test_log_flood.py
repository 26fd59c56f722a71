"""A replica that was let in and then says things without end: no log grows with what it says."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.core.log_rate import PEER_BURST, PEER_PER_S
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ControlChannel
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import LinkStream
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE
from asyncgrpo_agent.wire.host_proof import with_proof
from fakes import fleet
from fakes.fleet import Site

pytestmark = pytest.mark.slow

JOINS = 150
ACKS = 5_000
MOST_S = 60
MOST_LINES = PEER_BURST + MOST_S * PEER_PER_S  # of one event
Channel = ControlChannel[m.FromDialler, m.FromAcceptor]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


class Thief:
    """Has a replica's join line, and so may register; says what it likes then."""

    def __init__(self, address: str, join: Join) -> None:
        self.address = address
        self.join = join
        self.key = Ed25519PrivateKey.generate()

    async def come(self, number: int, acks: int) -> None:
        alpn = m.ALPN_REVERSED
        link = await dial(
            self.address,
            context=tls.client_context(self.join.ca_der, alpn),
            server_name=tls.SERVER_NAME,
            alpn=alpn,
            client=False,
            environ={},
        )

        async def serve(stream: LinkStream) -> None:
            await stream.respond(OK_RESPONSE)
            await self._register(ControlChannel(stream, FROM_ACCEPTOR), number, acks)
            await link.aclose("enough")

        with suppress(LinkError):
            await link.run(serve)

    async def _register(self, control: Channel, number: int, acks: int) -> None:
        challenge = await control.receive()
        assert isinstance(challenge, m.Challenge)
        hello = m.Hello(
            m.PROTOCOL, "replica", "demo", "thief", f"i{number}", "1.0", self.join.token, 4
        )
        await control.send(with_proof(hello, challenge.nonce, self.key))
        assert isinstance(await control.receive(), m.Accepted)
        for _ in range(acks):
            adapter = m.Adapter("demo.a0001-7f3c.v000001.abcd", "a0001-7f3c", 1, "abcd")
            await control.send(m.Ack(adapter, False, "x" * 4_000, {}))

    async def flood(self) -> None:
        with trio.fail_after(MOST_S):
            await self.come(0, ACKS)
            for number in range(1, JOINS):
                await self.come(number, 0)


def test_what_a_stolen_replica_says_fills_no_log(site: Site) -> None:
    proxy = site.proxy()
    trio.run(Thief(site.address, decode((site.folder / "replica.join").read_text())).flood)
    assert proxy.process.poll() is None
    assert proxy.end() == 0
    text = proxy.text()
    # The last messages before a goodbye may not be read any more.
    bounds = (("adapter.refused", ACKS // 2, ACKS), ("replica.joined", JOINS, JOINS))
    for event, least, most in bounds:
        lines = re.findall(rf"^\w+ {event}\b.*$", text, re.MULTILINE)
        counts = [int(count) for line in lines for count in re.findall(r"suppressed=(\d+)", line)]
        shown = len(lines) - len(counts)
        assert PEER_BURST <= shown <= MOST_LINES, event
        assert least <= shown + sum(counts) <= most, event
    assert len(text) < MOST_LINES * 4_500 + 200_000
    audited = (site.folder / "proxy/audit.jsonl").read_text().splitlines()
    joins = [one for line in audited if (one := json.loads(line))["event"] == "replica.joined"]
    assert len(joins) <= MOST_LINES
    assert sum(one.get("suppressed", 1) for one in joins) == JOINS
