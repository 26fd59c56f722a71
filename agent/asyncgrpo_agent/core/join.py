"""The join line: one line that gives an agent all it needs to reach and trust a proxy and a run.

`agrpo1.` and base64url of JSON with a checksum, so that a cut or mistyped line is found before
anything is dialled. It carries the CA's certificate itself, which OpenSSL then checks the proxy's
chain against; nothing is ever learnt from the proxy. It holds secrets: never print it but once, and
never put it into argv. A trainer's line may be made without the run's private key and completed
where that key is. A viewer signs and checks nothing: its line has no key, and may be for all runs.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.errors import ConfigError

PREFIX: Final = "agrpo1."
_CHECKSUM_BYTES: Final = 4
_KEY_BYTES: Final = 32

JoinRole = Literal["replica", "trainer", "viewer"]


class _Content(msgspec.Struct, frozen=True):
    addresses: list[str]
    ca: bytes
    token: str
    role: JoinRole
    run: str
    run_public_key: bytes
    run_private_key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Keys are raw Ed25519, 32 bytes; `ca_der` is a certificate; addresses are HOST:PORT.

    A viewer's public key is empty, and its run may be "*".
    """

    addresses: tuple[str, ...]
    ca_der: bytes = field(repr=False)
    token: str = field(repr=False)
    role: JoinRole
    run: str
    run_public_key: bytes
    run_private_key: bytes | None = field(default=None, repr=False)


def encode(join: Join) -> str:
    """The line, without a line end."""
    content = _Content(
        addresses=list(join.addresses),
        ca=join.ca_der,
        token=join.token,
        role=join.role,
        run=join.run,
        run_public_key=join.run_public_key,
        run_private_key=join.run_private_key,
    )
    body = msgspec.json.encode(content)
    return PREFIX + _base64(_checksum(body) + body)


def decode(text: str) -> Join:
    """Raises ConfigError for anything but a whole line that `encode` made, wrapped or not."""
    line = "".join(text.split())  # mail programs and terminals wrap long lines
    if not line.startswith(PREFIX):
        raise _refused(f"does not begin with {PREFIX}")
    encoded = line[len(PREFIX) :]
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise _refused("holds characters that no join line has") from None
    checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    # The last character may hold bits that decode to nothing, so the text is compared as well.
    if checksum != _checksum(body) or encoded != _base64(data):
        raise _refused("is cut or mistyped")
    try:
        content = msgspec.json.decode(body, type=_Content)
    except (msgspec.MsgspecError, RecursionError):  # strangers log in with lines of their own
        raise _refused("is of another version of the agent") from None
    keys = [] if content.role == "viewer" else [content.run_public_key]
    keys += [] if content.run_private_key is None else [content.run_private_key]
    if not content.addresses or any(len(key) != _KEY_BYTES for key in keys):
        raise _refused("lacks an address or a key")
    return Join(
        addresses=tuple(content.addresses),
        ca_der=content.ca,
        token=content.token,
        role=content.role,
        run=content.run,
        run_public_key=content.run_public_key,
        run_private_key=content.run_private_key,
    )


def with_run_key(join: Join, private_key: bytes) -> Join:
    """The join of a trainer that can sign. Raises ConfigError if the key is not its run's."""
    pair = Ed25519PrivateKey.from_private_bytes(private_key)
    if pair.public_key().public_bytes_raw() != join.run_public_key:
        raise ConfigError(
            f"was made for another key than that of run {join.run!r} on this host",
            where="the join line",
            fix="Compare what `asyncgrpo-agent run list` shows here and on the proxy",
        )
    return replace(join, run_private_key=private_key)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def _refused(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="the join line",
        fix="Copy it whole, or make a new one on the proxy: asyncgrpo-agent token create",
    )
