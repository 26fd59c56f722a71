"""TLS of the links.

One private CA vouches for the proxy; agents trust that CA and nothing else, so no public authority
can stand in for a proxy. The proxy is known by one fixed DNS name whatever address it is dialled
at. TLS 1.3 only. A handshake without the wanted ALPN protocol succeeds as far as OpenSSL is
concerned; here it is an error. Nothing in this file can be told to skip a check.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.errors import ConfigError, LinkError
from asyncgrpo_agent.net.tls_stream import TlsStream as TlsStream

SERVER_NAME: Final = "asyncgrpo-proxy"
HANDSHAKE_S: Final = 10.0


def server_context(chain: Path, key: Path, protocols: Sequence[str]) -> ssl.SSLContext:
    """The listener's side. `chain` and `key` are PEM files. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # links live for days: resumption buys nothing
    context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(chain, key, password=lambda: _no_password(key))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate or its key cannot be used: {error}", where=str(chain)
        ) from error
    return context


def _no_password(key: Path) -> str:
    """In place of OpenSSL's question on the terminal, which a service would wait for for ever."""
    raise ConfigError(
        "the key is encrypted, and nobody is there to be asked for its password",
        where=str(key),
        fix=f"Decrypt it for its owner alone: openssl pkey -in {key} -out NEW",
    )


def client_context(ca: bytes, protocol: str) -> ssl.SSLContext:
    """The dialler's side, which trusts the CA certificate `ca` (PEM or DER) only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and certificates
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols([protocol])
    try:
        pem = ca.startswith(b"-----")
        context.load_verify_locations(cadata=ca.decode("ascii") if pem else ca)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(
            f"the proxy's CA certificate cannot be read: {error}",
            fix="Ask the proxy's owner for a new join line",
        ) from error
    return context


async def secure_client(
    transport: trio.abc.Stream, context: ssl.SSLContext, server_name: str, protocol: str
) -> TlsStream:
    """Handshake as the TLS client. Raises LinkError; `transport` is closed then."""
    stream = TlsStream(transport, context, server_hostname=server_name)
    selected = await _handshake(stream)
    if selected != protocol:
        await trio.aclose_forcefully(stream)
        raise LinkError(
            f"the peer agreed on protocol {selected or 'none'} instead of {protocol}",
            fix="Check that the address is a proxy of this version, and that nothing between"
            " terminates TLS: the port needs TCP pass-through",
        )
    return stream


async def secure_server(
    transport: trio.abc.Stream, context: ssl.SSLContext, protocols: Sequence[str]
) -> tuple[TlsStream, str]:
    """Handshake as the TLS server; gives the stream and the protocol that both agreed on."""
    stream = TlsStream(transport, context, server_side=True)
    selected = await _handshake(stream)
    if selected is None or selected not in protocols:
        await trio.aclose_forcefully(stream)
        raise LinkError(
            f"the peer offers none of the protocols {', '.join(protocols)}",
            fix="Only agents and HTTP/2 clients may use this port",
        )
    return stream, selected


async def _handshake(stream: TlsStream) -> str | None:
    try:
        with trio.fail_after(HANDSHAKE_S):
            await stream.do_handshake()
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error, (trio.TooSlowError, trio.BrokenResourceError)):
            raise _named(error) from error
        raise
    return stream.selected_alpn_protocol()


def _named(error: trio.TooSlowError | trio.BrokenResourceError) -> LinkError:
    cause = error.__cause__
    if isinstance(error, trio.TooSlowError):
        return LinkError(f"no TLS handshake within {HANDSHAKE_S:g} s")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return LinkError(
            f"the proxy's certificate is refused: {cause.verify_message}",
            fix="Check that the join line is of this proxy, that nothing between terminates TLS,"
            " and this host's clock",
        )
    if isinstance(cause, ssl.SSLError) and cause.reason:
        return LinkError(f"TLS handshake failed: {cause.reason.replace('_', ' ').lower()}")
    return LinkError("the peer closed the connection during the TLS handshake")
