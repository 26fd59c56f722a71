"""Dialling out through a site's HTTP proxy: which one, TLS to it, and the CONNECT exchange.

`choose_proxy` is pure and reads the environment that it is given: `https_proxy` or `HTTPS_PROXY`,
and `no_proxy` or `NO_PROXY`. The proxy's password never appears in an error, a log or a repr.
The exchange is bounded in bytes and in time.

A proxy whose URL begins with `https://` is trusted as other programs trust it: by the certificates
in `SSL_CERT_FILE` and `SSL_CERT_DIR`, else by the host's own store. The CA of the link itself plays
no part in it, nor does this one in the link, which runs its own TLS through the tunnel.
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import h11
import trio

from asyncgrpo_agent.errors import ConfigError, LinkError
from asyncgrpo_agent.net.sockets import join_address

CONNECT_S: Final = 10.0
MAX_HEADER_BYTES: Final = 16 << 10
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# Debian, Fedora, SUSE, Alpine: where a Python that was built elsewhere does not look by itself.
_STORES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectProxy:
    """One HTTP proxy. `authorization` is a whole header value, "" for none."""

    host: str
    port: int
    tls: bool
    authorization: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        """How errors name it; "proxy" alone is the agents' own."""
        return f"HTTP proxy {join_address(self.host, self.port)}"


def choose_proxy(host: str, port: int, environ: Mapping[str, str]) -> ConnectProxy | None:
    """The proxy to dial `host` through, or None for a direct connection. Raises ConfigError."""
    for name in ("https_proxy", "HTTPS_PROXY"):
        url = environ.get(name, "").strip()
        if url:
            excepted = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
            return None if _is_excepted(host, port, excepted) else _parse_proxy(url, name)
    return None


def _parse_proxy(url: str, where: str) -> ConnectProxy:
    fix = "Write http://user:password@host:port, with special characters percent-encoded"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError("not a proxy's URL", where=where, fix=fix) from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigError(f"proxy of kind {parts.scheme} is not supported", where=where, fix=fix)
    if not host:
        raise ConfigError("the proxy's URL names no host", where=where, fix=fix)
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
    return ConnectProxy(
        host=host,
        port=port or _DEFAULT_PORTS[parts.scheme],
        tls=parts.scheme == "https",
        authorization=authorization,
    )


def _is_excepted(host: str, port: int, no_proxy: str) -> bool:
    return any(_matches(host.lower(), port, rule) for rule in no_proxy.lower().split(","))


def _matches(host: str, port: int, rule: str) -> bool:
    """Rules: `*`, `example.org` with its subdomains, an address, a network, each with `:port`."""
    name, colon, rule_port = rule.strip().rpartition(":")
    if colon and rule_port.isdigit() and (":" not in name or name.endswith("]")):
        if int(rule_port) != port:
            return False
    else:
        name = rule.strip()
    if name == "*":
        return True
    name = name.removeprefix("[").removesuffix("]").removeprefix("*").lstrip(".")
    if not name:
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
    except ValueError:  # one of them is a name
        return host == name or host.endswith("." + name)


def trust(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Which certificates an https:// proxy may have. Raises ConfigError."""
    file, folder = environ.get("SSL_CERT_FILE"), environ.get("SSL_CERT_DIR")
    known = ssl.get_default_verify_paths()
    if not (file or folder or known.cafile or known.capath):
        file = next((path for path in _STORES if Path(path).exists()), None)
    try:
        return ssl.create_default_context(cafile=file or None, capath=folder or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificates to trust an https:// proxy by cannot be read: {error}",
            where=f"SSL_CERT_FILE {file}",
            fix="Name a readable file of PEM certificates there, or unset it",
        ) from error


async def secure_proxy(
    transport: trio.abc.Stream, proxy: ConnectProxy, environ: Mapping[str, str]
) -> trio.abc.Stream:
    """TLS to the proxy itself. Raises LinkError, ConfigError; the caller closes then."""
    stream = trio.SSLStream(
        transport, trust(environ), server_hostname=proxy.host, https_compatible=True
    )
    try:
        with trio.fail_after(CONNECT_S):
            await stream.do_handshake()
    except trio.TooSlowError:
        raise LinkError(
            f"no TLS handshake within {CONNECT_S:g} s",
            where=proxy.where,
            fix="Write http:// in HTTPS_PROXY if this proxy itself speaks no TLS",
        ) from None
    except trio.BrokenResourceError as error:
        raise _handshake_error(error.__cause__, proxy.where) from error
    return stream


def _handshake_error(cause: BaseException | None, where: str) -> LinkError:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return LinkError(
            f"the HTTP proxy's own certificate is refused: {cause.verify_message}",
            where=where,
            fix="Write the proxy's name as its certificate has it, and put its CA into the host's"
            " store or name it in SSL_CERT_FILE",
        )
    if isinstance(cause, ssl.SSLError) and cause.reason:
        return LinkError(
            f"TLS handshake failed: {cause.reason.replace('_', ' ').lower()}",
            where=where,
            fix="Write http:// in HTTPS_PROXY if this proxy itself speaks no TLS",
        )
    return LinkError("the HTTP proxy closed the connection during the TLS handshake", where=where)


async def connect_through(
    stream: trio.abc.Stream, proxy: ConnectProxy, host: str, port: int
) -> None:
    """Have the proxy at the other end of `stream` join it to `host`. Raises LinkError."""
    where = proxy.where
    try:
        with trio.fail_after(CONNECT_S):
            answer = await _exchange(stream, proxy, join_address(host, port), where)
    except trio.TooSlowError:
        raise LinkError(f"no answer to CONNECT within {CONNECT_S:g} s", where=where) from None
    except trio.BrokenResourceError as error:
        raise LinkError(
            f"the connection to the proxy broke: {error.__cause__ or 'closed by the proxy'}",
            where=where,
        ) from error
    if not 200 <= answer.status_code < 300:
        raise _refusal(answer.status_code, join_address(host, port), where)


async def _exchange(
    stream: trio.abc.Stream, proxy: ConnectProxy, target: str, where: str
) -> h11.Response:
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
    headers = [("Host", target)]
    if proxy.authorization:
        headers.append(("Proxy-Authorization", proxy.authorization))
    request = h11.Request(method="CONNECT", target=target, headers=headers)
    await stream.send_all((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    try:
        event = http.next_event()
        while not isinstance(event, h11.Response):
            if event is h11.NEED_DATA:
                data = await stream.receive_some(4096)
                if not data:
                    raise LinkError("the proxy closed the connection", where=where)
                http.receive_data(bytes(data))
            event = http.next_event()
    except h11.RemoteProtocolError as error:
        raise LinkError(f"the answer is not HTTP: {error}", where=where) from error
    if 200 <= event.status_code < 300 and http.trailing_data[0]:
        # In TLS the client speaks first: these bytes are not of the server behind the proxy.
        raise LinkError("the proxy sent bytes into a tunnel that was still silent", where=where)
    return event


def _refusal(status: int, target: str, where: str) -> LinkError:
    if status == 407:
        return LinkError(
            "the proxy wants a user and a password, or others than it got (407)",
            where=where,
            fix="Put them into HTTPS_PROXY: http://user:password@host:port",
        )
    if status in (403, 405):
        return LinkError(
            f"the proxy does not allow a connection to {target} ({status})",
            where=where,
            fix=f"Have CONNECT to {target} allowed there, or list the host in NO_PROXY",
        )
    return LinkError(f"the proxy could not connect to {target} ({status})", where=where)
