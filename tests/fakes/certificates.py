"""A private CA and a proxy's certificate, made once for the whole test run."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from asyncgrpo_agent.net.tls import client_context, server_context
from asyncgrpo_agent.store.certificates import issue_server, make_ca


def today() -> datetime:
    """The real date, because OpenSSL looks at the real clock."""
    return datetime.now(UTC)  # noqa: TID251


@cache
def authority() -> tuple[bytes, bytes]:
    return make_ca("test run", now=today())


@cache
def proxy_context(protocols: Sequence[str]) -> ssl.SSLContext:
    chain, key = issue_server(*authority(), ["localhost", "127.0.0.1"], now=today())
    with tempfile.TemporaryDirectory() as folder:
        chain_path, key_path = Path(folder, "chain.pem"), Path(folder, "key.pem")
        chain_path.write_bytes(chain)
        key_path.write_bytes(key)
        return server_context(chain_path, key_path, protocols)


def agent_context(protocol: str) -> ssl.SSLContext:
    return client_context(authority()[0], protocol)
