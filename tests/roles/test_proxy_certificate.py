from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
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

ADDRESS = "127.0.0.1"  # a handshake names no server that is dialled by address


def proxy_config(folder: Path, **keys: str) -> Config:
    environ = {f"ASYNCGRPO_PROXY_{key.upper()}": value for key, value in keys.items()}
    environ["ASYNCGRPO_STATE_DIR"] = str(folder / "state")
    return parse(role="proxy", cwd=folder, environ=environ)


async def connect(
    certificate: ServerCertificate, ca: bytes, name: str = SERVER_NAME
) -> tuple[TlsStream, TlsStream]:
    near, far = memory_stream_pair()
    ends: list[TlsStream] = []

    async def accept() -> None:
        stream, _ = await secure_server(far, certificate.context, PROTOCOLS)
        ends.append(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        client = await secure_client(near, client_context(ca, "h2"), name, "h2")
    return client, ends[0]


def shown(stream: TlsStream) -> x509.Certificate:
    return x509.load_der_x509_certificate(stream.ssl_object.getpeercert(binary_form=True) or b"")


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


@cache
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def with_rsa() -> tuple[bytes, bytes]:
    """What `issue_server` makes, with a key of another type: (chain, key)."""
    leaf = x509.load_pem_x509_certificate(issue_server(*authority(), [ADDRESS], now=today())[0])
    ca_key = serialization.load_pem_private_key(authority()[1], None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        leaf.issuer,
        leaf.subject,
        rsa_key().public_key(),
        leaf.serial_number,
        leaf.not_valid_before_utc,
        leaf.not_valid_after_utc,
        [extension for extension in leaf.extensions if extension.oid.dotted_string != "2.5.29.14"],
    )
    made = builder.sign(ca_key, hashes.SHA256())
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    key = rsa_key().private_bytes(pem, form, serialization.NoEncryption())
    return made.public_bytes(pem) + authority()[0], key


def give(folder: Path, *, chain: bool = True, key: bool = True, kind: str = "ec") -> None:
    """Write another pair, or one half of it."""
    made_chain, made_key = (
        with_rsa() if kind == "rsa" else issue_server(*authority(), [ADDRESS], now=today())
    )
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
    assert not (tmp_path / "state" / "proxy").exists()


def written(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "chain.pem").read_bytes()).serial_number


@pytest.mark.parametrize("kinds", [("ec", "rsa", "ec", "rsa"), ("rsa", "ec", "ec", "rsa", "rsa")])
async def test_given_files_may_change_the_type_of_the_key(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    give(tmp_path, kind=kinds[0])
    certificate = ServerCertificate(proxy_config(tmp_path, certificate="chain.pem", key="key.pem"))
    ca = authority()[0]
    before, server = await connect(certificate, ca)
    for kind in kinds[1:]:
        give(tmp_path, kind=kind)
        certificate.refresh()
        for name in (SERVER_NAME, ADDRESS):
            client, _ = await connect(certificate, ca, name)
            public = shown(client).public_key()
            assert isinstance(
                public, rsa.RSAPublicKey if kind == "rsa" else ec.EllipticCurvePublicKey
            )
            assert shown(client).serial_number == written(tmp_path)
    await server.send_all(b"still here")
    assert await before.receive_some() == b"still here"


@pytest.mark.parametrize(("old", "new"), [("ec", "rsa"), ("rsa", "ec")])
@pytest.mark.parametrize("first", ["chain", "key"])
async def test_half_a_pair_of_another_type_is_not_shown(
    tmp_path: Path, old: str, new: str, first: str
) -> None:
    give(tmp_path, kind=old)
    certificate = ServerCertificate(proxy_config(tmp_path, certificate="chain.pem", key="key.pem"))
    ca, before = authority()[0], written(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    give(made, kind=new)
    halves = ["chain.pem", "key.pem"] if first == "chain" else ["key.pem", "chain.pem"]
    (made / halves[0]).replace(tmp_path / halves[0])
    with pytest.raises(ConfigError, match="cannot be used"):
        certificate.refresh()
    assert await shown_now(certificate, ca) == before
    (made / halves[1]).replace(tmp_path / halves[1])
    certificate.refresh()
    assert await shown_now(certificate, ca) == written(tmp_path) != before


async def test_a_key_that_could_not_be_read_is_tried_again_once_it_can(tmp_path: Path) -> None:
    give(tmp_path)
    certificate = ServerCertificate(proxy_config(tmp_path, certificate="chain.pem", key="key.pem"))
    give(tmp_path)
    kept = tmp_path / "kept.pem"
    (tmp_path / "key.pem").rename(kept)
    (tmp_path / "key.pem").mkdir()  # what even root cannot read as a file
    with pytest.raises(ConfigError, match="cannot be used"):
        certificate.refresh()
    certificate.refresh()  # said once
    assert not certificate.is_usable
    (tmp_path / "key.pem").rmdir()
    kept.rename(tmp_path / "key.pem")
    certificate.refresh()
    assert certificate.is_usable
    assert await shown_now(certificate, authority()[0]) == written(tmp_path)


def test_given_files_that_do_not_fit_end_the_start(tmp_path: Path) -> None:
    give(tmp_path)
    give(tmp_path, chain=False)
    config = proxy_config(tmp_path, certificate="chain.pem", key="key.pem")
    with pytest.raises(ConfigError, match="cannot be used"):
        ServerCertificate(config)
