"""Client to one vLLM behind a URL: TLS by the host's trust or a CA's file, and a bearer token.

The site's HTTP proxy is used where the environment names one. Connections are watched by
keep-alive, because a rollout is silent for minutes and what lies between forgets silent ones.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpcore

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.net.connect_proxy import choose_proxy, trust
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.net.pool_exchanger import PoolExchanger
from asyncgrpo_agent.net.sockets import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    UNACKNOWLEDGED_S,
)

CONNECT_S: Final = 10.0  # TCP, and TLS as much again
_KEEPALIVE_S: Final = 10.0  # a handshake over a distance is dear, and edges keep idle ones
# Measured: httpcore's bookkeeping, which grows with idle times open ones, against handshakes.
_IDLE_CONNECTIONS: Final = 16
_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000),
)


def upstream_client(url: str, *, ca_file: str, environ: Mapping[str, str]) -> EngineClient:
    """A client without a token yet, see `headers_for`. Raises ConfigError."""
    base = url.rstrip("/")
    return EngineClient(
        base,
        PoolExchanger(
            _pool(base, upstream_context(ca_file, environ), environ), base, connect_s=CONNECT_S
        ),
        headers=headers_for(base, ""),
    )


def headers_for(url: str, token: str) -> list[tuple[str, str]]:
    """What every request carries. The token goes there alone: no redirect is followed."""
    headers = [("host", urlsplit(url).netloc), ("accept-encoding", "identity")]
    return [*headers, ("authorization", f"Bearer {token}")] if token else headers


def upstream_context(ca_file: str, environ: Mapping[str, str]) -> ssl.SSLContext:
    """Trusts the CA in the file and nothing else, or without one what this host trusts."""
    if not ca_file:
        return trust(environ)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the CA's certificate cannot be read: {error}",
            where=f"ca_file {Path(ca_file)}",
            fix="Name a readable PEM file there, or leave it out",
        ) from error


def _pool(
    url: str, context: ssl.SSLContext, environ: Mapping[str, str]
) -> httpcore.AsyncConnectionPool:
    parts = urlsplit(url)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    chosen = choose_proxy(host, parts.port or 443, environ) if is_tls else None
    proxy = None
    if chosen is not None:
        scheme = "https" if chosen.tls else "http"
        named = [("Proxy-Authorization", chosen.authorization)] if chosen.authorization else None
        proxy = httpcore.Proxy(
            httpcore.URL(scheme=scheme, host=chosen.host, port=chosen.port, target="/"),
            headers=named,
            ssl_context=trust(environ) if chosen.tls else None,
        )
    return httpcore.AsyncConnectionPool(
        ssl_context=context,
        proxy=proxy,
        max_connections=None,  # the upstream's capacity is the limit
        max_keepalive_connections=_IDLE_CONNECTIONS,
        keepalive_expiry=_KEEPALIVE_S,
        network_backend=httpcore.TrioBackend(),
        socket_options=_SOCKET_OPTIONS,
    )
