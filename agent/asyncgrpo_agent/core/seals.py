"""The seal at the end of a manifest: sha256 of its bytes, and the run key's signature over them.

A sealed manifest is TOML, a body and then a seal of fixed length. The seal is checked on the raw
bytes before anything is parsed, so a cut, flipped or forged manifest never reaches the TOML
reader. The context keeps a signature for one kind of manifest from fitting another.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from typing import Any, Final, TypeVar

import msgspec
import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from asyncgrpo_agent.errors import AdapterRefusedError

MAX_SEALED_BYTES: Final = 1 * 2**20
REPUBLISH: Final = "The next publication replaces it"

_SEAL: Final = '\n[seal]\ndigest = "{digest}"\nsignature = "{signature}"\n'
_SEAL_BYTES: Final = len(_SEAL.format(digest="0" * 64, signature="0" * 128))
_SEAL_RE: Final = re.compile(
    rb'\n\[seal\]\ndigest = "([0-9a-f]{64})"\nsignature = "([0-9a-f]{128})"\n'
)

Manifest = TypeVar("Manifest", bound=msgspec.Struct)


def seal(manifest: msgspec.Struct, private_key: bytes, *, context: bytes) -> bytes:
    """The sealed bytes. Raises AdapterRefusedError for what no reader would take."""
    try:
        body = tomli_w.dumps(msgspec.to_builtins(manifest)).encode()
    except UnicodeEncodeError as error:
        raise refused("holds text that is not Unicode", "Rename the base model") from error
    signature = Ed25519PrivateKey.from_private_bytes(private_key).sign(context + body)
    end = _SEAL.format(digest=hashlib.sha256(body).hexdigest(), signature=signature.hex())
    if len(body) + len(end) > MAX_SEALED_BYTES:
        raise refused("is too large", "Shorten rank_pattern, or save fewer files")
    return body + end.encode()


def is_sealed(data: bytes) -> bool:
    """Whether the last bytes look like a seal; if not it was cut, or is still being written."""
    return _SEAL_RE.fullmatch(data[-_SEAL_BYTES:]) is not None


def unseal(
    data: bytes,
    kind: type[Manifest],
    *,
    public_key: bytes | None,
    context: bytes,
    newest_format: int,
) -> Manifest:
    """The manifest, or AdapterRefusedError: cut, corrupt, forged, of another kind, or newer.

    Without a key the signature is not checked; only what is never given to an engine may be read
    so.
    """
    body = _verified_body(data, public_key, context)
    row = _parse(body)
    found = row.get("format")
    if isinstance(found, int) and found > newest_format:
        raise refused(
            f"has format {found}, and this agent reads up to {newest_format}", "Update this agent"
        )
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        raise refused(f"makes no sense: {error}", REPUBLISH) from error


def _verified_body(data: bytes, public_key: bytes | None, context: bytes) -> bytes:
    if len(data) > MAX_SEALED_BYTES:
        raise refused(f"has over {MAX_SEALED_BYTES} bytes", "See who else writes to the bucket")
    body, end = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    match = _SEAL_RE.fullmatch(end)
    if match is None or not body:
        raise refused("is cut: its seal is missing", REPUBLISH)
    if hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise refused("is corrupt: its digest does not match", REPUBLISH)
    if public_key is None:
        return body
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(
            bytes.fromhex(match[2].decode()), context + body
        )
    except InvalidSignature as error:
        raise refused(
            "is not signed with the run's key",
            "Compare the run's key in this host's join with the trainer's",
        ) from error
    return body


def _parse(body: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise refused(f"is not TOML: {error}", REPUBLISH) from error


def refused(what: str, fix: str) -> AdapterRefusedError:
    return AdapterRefusedError(what, where="commit", fix=fix)
