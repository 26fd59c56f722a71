from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from trio.testing import MockClock, memory_stream_pair

from asyncgrpo_agent.errors import ConfigError, LinkError
from asyncgrpo_agent.net.tls import (
    SERVER_NAME,
    TlsStream,
    client_context,
    secure_client,
    secure_server,
    server_context,
)
from asyncgrpo_agent.store.certificates import issue_server, make_ca
from fakes.certificates import agent_context, authority, proxy_context, today

PROTOCOLS = ("agrpo-rev/1", "h2")


async def handshake(
    client: ssl.SSLContext,
    *,
    protocol: str,
    name: str = SERVER_NAME,
    server: ssl.SSLContext | None = None,
) -> tuple[TlsStream | LinkError, tuple[TlsStream, str] | LinkError]:
    """Both sides of one handshake, each with what it got or what it raised."""
    near, far = memory_stream_pair()
    results: dict[str, object] = {}

    async def dialler() -> None:
        try:
            results["client"] = await secure_client(near, client, name, protocol)
        except LinkError as error:
            results["client"] = error

    async def listener() -> None:
        try:
            results["server"] = await secure_server(
                far, server or proxy_context(PROTOCOLS), PROTOCOLS
            )
        except LinkError as error:
            results["server"] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialler)
        nursery.start_soon(listener)
    return results["client"], results["server"]  # type: ignore[return-value]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_both_sides_agree_on_the_protocol(protocol: str) -> None:
    client, server = await handshake(agent_context(protocol), protocol=protocol)
    assert isinstance(client, TlsStream)
    assert isinstance(server, tuple)
    assert server[1] == protocol
    assert server[0].ssl_object.version() == "TLSv1.3"


async def test_other_protocol_is_a_named_error_on_both_sides() -> None:
    client, server = await handshake(agent_context("http/1.1"), protocol="h2")
    assert isinstance(client, LinkError)
    assert "protocol none instead of h2" in client.what
    assert isinstance(server, LinkError)
    assert "offers none of the protocols" in server.what


async def test_other_authority_is_refused_by_name() -> None:
    foreign, _ = make_ca("test run", now=today())
    client, server = await handshake(client_context(foreign, "h2"), protocol="h2")
    assert isinstance(client, LinkError)
    assert "certificate is refused" in client.what
    assert isinstance(server, LinkError)


async def test_other_server_name_is_refused() -> None:
    client, _ = await handshake(agent_context("h2"), protocol="h2", name="other.example")
    assert isinstance(client, LinkError)
    assert "not valid for 'other.example'" in client.what


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_other_given_names_are_in_the_certificate(name: str) -> None:
    client, _ = await handshake(agent_context("h2"), protocol="h2", name=name)
    assert isinstance(client, TlsStream)


async def test_expired_certificate_is_refused(tmp_path: Path) -> None:
    chain, key = issue_server(*authority(), [], now=today() - timedelta(days=91))
    (tmp_path / "chain.pem").write_bytes(chain)
    (tmp_path / "key.pem").write_bytes(key)
    server = server_context(tmp_path / "chain.pem", tmp_path / "key.pem", PROTOCOLS)
    client, _ = await handshake(agent_context("h2"), protocol="h2", server=server)
    assert isinstance(client, LinkError)
    assert "expired" in client.what


async def test_silent_peer_runs_into_the_deadline(autojump_clock: MockClock) -> None:
    near, _far = memory_stream_pair()
    with pytest.raises(LinkError, match="within 10 s"):
        await secure_client(near, agent_context("h2"), SERVER_NAME, "h2")
    assert trio.current_time() == 10


async def test_peer_that_is_no_tls_server_is_named() -> None:
    near, far = memory_stream_pair()
    await far.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(LinkError, match="TLS handshake failed"):
        await secure_client(near, agent_context("h2"), SERVER_NAME, "h2")


def test_authority_is_taken_as_der_too() -> None:
    certificate = x509.load_pem_x509_certificate(authority()[0])
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert client_context(der, "h2").cert_store_stats()["x509_ca"] == 1


@pytest.mark.parametrize("ca", [b"", b"rubbish", b"-----BEGIN CERTIFICATE-----\nx"])
def test_unreadable_authority_is_a_config_error(ca: bytes) -> None:
    with pytest.raises(ConfigError, match="CA certificate"):
        client_context(ca, "h2")


def test_missing_certificate_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        server_context(tmp_path / "no", tmp_path / "no", PROTOCOLS)


def test_encrypted_key_is_a_config_error_and_nobody_is_asked(tmp_path: Path) -> None:
    chain, key = issue_server(*authority(), [], now=today())
    encrypted = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "chain.pem").write_bytes(chain)
    (tmp_path / "server.key").write_bytes(encrypted)
    with pytest.raises(ConfigError, match="is encrypted") as caught:
        server_context(tmp_path / "chain.pem", tmp_path / "server.key", PROTOCOLS)
    assert caught.value.where == str(tmp_path / "server.key")
    assert "openssl pkey" in caught.value.fix
