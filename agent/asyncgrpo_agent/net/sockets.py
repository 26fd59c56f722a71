"""Addresses as people write them, and the options of every TCP socket that carries a link.

The options find a dead peer that sends no reset: keep-alives while idle, a limit on bytes that
stay unacknowledged otherwise.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio
from trio import socket

from asyncgrpo_agent.errors import ConfigError

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3
UNACKNOWLEDGED_S: Final = 20


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: where its port starts is a guess
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(
            "not an address", where=repr(address), fix="Write host:port, or [IPv6 address]:port"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def set_liveness(stream: trio.SocketStream) -> None:
    """Send at once, notice a dead peer. Must run before TLS wraps the stream."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_S * 1000),
    ):
        option = getattr(socket, name, None)  # Linux has all of them, others some
        if option is not None:
            with suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, option, value)
