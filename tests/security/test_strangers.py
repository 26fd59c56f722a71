"""Strangers at the port of a whole proxy, and what they must not reach."""

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core.join import Join, decode, encode
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.socket_stream import DirectStream
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


async def say_all(site: Site) -> None:
    async with trio.open_nursery() as nursery:
        for alpn in (m.ALPN_FORWARD, m.ALPN_REVERSED):
            for bomb in BOMBS:
                nursery.start_soon(say, site, alpn, framed(bomb))


def test_a_hello_that_is_a_bomb_ends_its_own_link_only(site: Site) -> None:
    proxy = site.proxy()
    trio.run(say_all, site)
    replica = site.replica("r1")
    replica.wait_for("link.up")
    assert is_at_work(proxy), proxy.text()
    assert replica.end() == 0


# --- join lines that were bent -------------------------------------------------------------------


def bend(site: Site, source: str, name: str, **other: Any) -> None:
    """Write the join `name`, which is `source` but for what is given."""
    join = decode((site.folder / f"{source}.join").read_text())
    bent = site.folder / f"{name}.join"
    bent.write_text(encode(replace(join, **other)))
    bent.chmod(0o600)


def test_a_join_is_good_for_its_own_role_and_run_alone(site: Site) -> None:
    site.hosts.command("run", "create", "other", f"--state-dir={site.folder}/proxy")
    proxy = site.proxy()
    key = Ed25519PrivateKey.generate()
    pair = {
        "run_public_key": key.public_key().public_bytes_raw(),
        "run_private_key": key.private_bytes_raw(),
    }
    bend(site, "replica", "climber", role="trainer", **pair)
    bend(site, "trainer", "stray", run="other")
    bend(site, "trainer", "falling", role="replica", run_private_key=None)
    climber = site.trainer(1, "--join=climber.join")
    stray = site.trainer(1, "--join=stray.join", f"--state-dir={site.folder}/stray")
    falling = site.replica("r1", "--join=falling.join")
    for agent, reason in (
        (climber, "the token is for a replica, not for a trainer"),
        (stray, "the token is not valid for this run"),
        (falling, "the token is for a trainer, not for a replica"),
    ):
        assert agent.process.wait(30) == 78, agent.text()
        assert reason in agent.text()
    assert "joined" not in proxy.text()
    assert is_at_work(proxy)


# --- ten thousand at the door --------------------------------------------------------------------

MANY = 10_000
AT_ONCE = 256
FIRST_WORDS = [
    None,  # no TLS at all, and silent
    b"",  # silent behind TLS
    b"GET / HTTP/1.1\r\nhost: h\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\xff" * 64,
]


@dataclass
class Crowd:
    """Connections from many addresses, each of which is let go before the next takes its place."""

    site: Site
    made: int = 0
    secured: int = 0
    refused: int = 0

    async def come(self) -> None:
        context = tls.client_context(join_of(self.site).ca_der, m.ALPN_FORWARD)
        async with trio.open_nursery() as nursery:
            places = trio.CapacityLimiter(AT_ONCE)
            for number in range(MANY):
                await places.acquire_on_behalf_of(number)
                nursery.start_soon(self._one, number, context, places)

    async def _one(
        self, number: int, context: ssl.SSLContext, places: trio.CapacityLimiter
    ) -> None:
        words = FIRST_WORDS[number % len(FIRST_WORDS)]
        try:
            with trio.move_on_after(20):
                await self._visit(f"127.{1 + number % 40}.{number // 40 % 250}.1", words, context)
        except (OSError, LinkError, trio.BrokenResourceError):
            self.refused += 1
        finally:
            places.release_on_behalf_of(number)

    async def _visit(self, source: str, words: bytes | None, context: ssl.SSLContext) -> None:
        host, _, port = self.site.address.rpartition(":")
        transport = await trio.open_tcp_stream(host, int(port), local_address=source)
        self.made += 1
        async with transport:
            if words is None:
                await trio.sleep(1)
                return
            stream = await tls.secure_client(
                DirectStream(transport), context, tls.SERVER_NAME, m.ALPN_FORWARD
            )
            self.secured += 1
            await stream.send_all(words)
            with trio.move_on_after(1):
                while await stream.receive_some(65536):
                    pass
            await trio.aclose_forcefully(stream)


def peak_rss_mib(pid: int) -> float:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (row for row in rows if row.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


@pytest.mark.deep
def test_ten_thousand_strangers_cost_a_fleet_at_work_no_rollout(site: Site) -> None:
    proxy = site.proxy()
    replicas = [site.replica(name, "--", "--fake-tokens-per-s=100") for name in ("r1", "r2")]
    enough = site.folder / "enough"
    trainer = site.trainer(
        *(100_000, "--min-replicas=2", "--set=train.fake_rollouts=16"),
        f"--set=train.fake_until={enough}",
    )
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    before_mib, began = peak_rss_mib(proxy.process.pid), time.monotonic()
    first = trainer.text().count("adapter.published")
    crowd = Crowd(site)
    trio.run(crowd.come)
    took_s = time.monotonic() - began
    steps = trainer.text().count("adapter.published") - first
    more_mib = peak_rss_mib(proxy.process.pid) - before_mib
    print(  # noqa: T201 - shown by pytest -s
        f"{crowd.made} connections, {crowd.secured} of them TLS, {crowd.refused} refused or cut,"
        f" in {took_s:.0f} s; {steps} steps meanwhile; {more_mib:.1f} MiB more at the proxy"
    )
    assert crowd.made == MANY
    assert steps > 0
    assert more_mib < 150
    assert "link.lost" not in trainer.text()
    enough.touch()
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts()["failed"] == 0
    for replica in replicas:
        assert replica.process.wait(20) == 0
        assert replica.text().count("link.up") == 1
    assert is_at_work(proxy)
