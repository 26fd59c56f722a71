from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import trio
from cryptography import x509
from trio.testing import MockClock, memory_stream_pair

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.config.sources import parse
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.net.accept import PROTOCOLS
from asyncgrpo_agent.net.tls import (
    SERVER_NAME,
    TlsStream,
    client_context,
    secure_client,
    secure_server,
)
from asyncgrpo_agent.roles.proxy_certificate import ServerCertificate
from asyncgrpo_agent.store.certificates import issue_server
from fakes.certificates import authority, today


def proxy_config(folder: Path, **keys: str) -> Config:
    environ = {f"ASYNCGRPO_PROXY_{key.upper()}": value for key, value in keys.items()}
    environ["ASYNCGRPO_STATE_DIR"] = str(folder / "state")
    return parse(role="proxy", cwd=folder, environ=environ)


async def connect(certificate: ServerCertificate, ca: bytes) -> tuple[TlsStream, TlsStream]:
    near, far = memory_stream_pair()
    ends: list[TlsStream] = []

    async def accept() -> None:
        stream, _ = await secure_server(far, certificate.context, PROTOCOLS)
        ends.append(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        client = await secure_client(near, client_context(ca, "h2"), SERVER_NAME, "h2")
    return client, ends[0]


def shown(stream: TlsStream) -> x509.Certificate:
    return x509.load_der_x509_certificate(stream.getpeercert(binary_form=True))


async def shown_now(certificate: ServerCertificate, ca: bytes) -> int:
    client, _ = await connect(certificate, ca)
    return shown(client).serial_number


@dataclass
class Wall:
    """A wall clock that goes with trio's and can be put forward."""

    start: datetime

    def now(self) -> datetime:
        return self.start + timedelta(seconds=trio.current_time())


async def test_an_own_certificate_is_renewed_thirty_days_before_its_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    wall = Wall(today() - timedelta(days=70))  # OpenSSL looks at the real clock
    certificate = ServerCertificate(proxy_config(tmp_path), wall.now)
    ca = (tmp_path / "state/proxy/ca.pem").read_bytes()
    before, server = await connect(certificate, ca)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.keep)
        wall.start += timedelta(days=60, minutes=-30)
        await trio.sleep(1700)
        assert await shown_now(certificate, ca) == shown(before).serial_number
        await trio.sleep(200)
        after, _ = await connect(certificate, ca)
        assert shown(after).serial_number != shown(before).serial_number
        life = shown(after).not_valid_after_utc - shown(before).not_valid_after_utc
        assert abs(life - timedelta(days=60)) < timedelta(hours=1)
        await server.send_all(b"still here")  # the old handshake's link is not touched
        assert await before.receive_some() == b"still here"
        nursery.cancel_scope.cancel()


async def test_a_restart_issues_another_under_the_same_ca(tmp_path: Path) -> None:
    config = proxy_config(tmp_path)
    first = ServerCertificate(config)
    ca = (tmp_path / "state/proxy/ca.pem").read_bytes()
    second = ServerCertificate(config)
    assert await shown_now(first, ca) != await shown_now(second, ca)
    assert (tmp_path / "state/proxy/ca.pem").read_bytes() == ca


def give(folder: Path, *, chain: bool = True, key: bool = True) -> None:
    """Write another pair, or one half of it."""
    made_chain, made_key = issue_server(*authority(), [], now=today())
    for wanted, name, data in ((chain, "chain.pem", made_chain), (key, "key.pem", made_key)):
        if wanted:
            (folder / f"{name}.new").write_bytes(data)
            (folder / f"{name}.new").replace(folder / name)


async def test_given_files_are_loaded_again_when_they_change(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    give(tmp_path)
    config = proxy_config(tmp_path, certificate="chain.pem", key="key.pem")
    certificate = ServerCertificate(config)
    ca = authority()[0]
    serials = [await shown_now(certificate, ca)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.keep)
        give(tmp_path)
        await trio.sleep(61)
        serials.append(await shown_now(certificate, ca))
        give(tmp_path, key=False)  # a chain whose key is still on its way
        await trio.sleep(601)
        assert caplog.text.count("certificate.unusable") == 1
        serials.append(await shown_now(certificate, ca))
        (tmp_path / "key.pem").unlink()
        await trio.sleep(61)
        give(tmp_path)
        await trio.sleep(61)
        serials.append(await shown_now(certificate, ca))
        nursery.cancel_scope.cancel()
    first, second, third, last = serials
    assert first != second == third != last
    assert not (tmp_path / "state").exists()


def test_given_files_that_do_not_fit_end_the_start(tmp_path: Path) -> None:
    give(tmp_path)
    give(tmp_path, chain=False)
    config = proxy_config(tmp_path, certificate="chain.pem", key="key.pem")
    with pytest.raises(ConfigError, match="cannot be used"):
        ServerCertificate(config)
