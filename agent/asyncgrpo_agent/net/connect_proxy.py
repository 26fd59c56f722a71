"""Dialling out through a site's HTTP proxy: which one, and the CONNECT exchange with it.

`choose_proxy` is pure and reads the environment that it is given: `https_proxy` or `HTTPS_PROXY`,
and `no_proxy` or `NO_PROXY`. The proxy's password never appears in an error, a log or a repr.
The exchange is bounded in bytes and in time.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

import h11
import trio

from asyncgrpo_agent.errors import ConfigError, LinkError
from asyncgrpo_agent.net.sockets import join_address

CONNECT_S: Final = 10.0
MAX_HEADER_BYTES: Final = 16 << 10
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectProxy:
    """One HTTP proxy. `authorization` is a whole header value, "" for none."""

    host: str
    port: int
    tls: bool
    authorization: str = field(default="", repr=False)


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


async def connect_through(
    stream: trio.abc.Stream, proxy: ConnectProxy, host: str, port: int
) -> None:
    """Have the proxy at the other end of `stream` join it to `host`. Raises LinkError."""
    where = f"proxy {join_address(proxy.host, proxy.port)}"
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
