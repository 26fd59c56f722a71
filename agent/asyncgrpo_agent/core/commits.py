"""The commit: the signed manifest that makes an adapter exist.

On disk it is TOML, a body and then a seal of fixed length: the sha256 of the body's bytes and an
Ed25519 signature over them. The seal is checked on the raw bytes before anything is parsed, so a
cut, flipped or forged commit never reaches the TOML reader. A commit names only its own adapter's
two files, in one folder of its own attempt and version.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from math import isfinite
from typing import Final

import msgspec
import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from asyncgrpo_agent.core.adapters import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterId,
    adapter_digest,
    adapter_folder,
    is_attempt,
    is_run_name,
    parse_name,
)
from asyncgrpo_agent.core.lora import LoraFacts
from asyncgrpo_agent.errors import AdapterRefusedError

FORMAT: Final = 1
MAX_COMMIT_BYTES: Final = 1 * 2**20
MAX_FILE_BYTES: Final = {CONFIG_FILE: 1 * 2**20, WEIGHTS_FILE: 16 * 2**30}
MAX_RETRIES: Final = 3
_MAX_VERSION: Final = 999_999_999
_MAX_LIVE: Final = 256

_CONTEXT: Final = b"asyncgrpo commit\n"  # so that no other signature of the run key fits here
_SEAL: Final = '\n[seal]\ndigest = "{digest}"\nsignature = "{signature}"\n'
_SEAL_BYTES: Final = len(_SEAL.format(digest="0" * 64, signature="0" * 128))
_SEAL_RE: Final = re.compile(
    rb'\n\[seal\]\ndigest = "([0-9a-f]{64})"\nsignature = "([0-9a-f]{128})"\n'
)
_REPUBLISH: Final = "The next publication replaces it"
_SHA256_RE: Final = re.compile(r"[0-9a-f]{64}")


class CommitFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the adapter; `key` is its path below the run's folder."""

    name: str
    size_bytes: int
    sha256: str
    key: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer published. `live` holds the physical names that the run wanted just before."""

    format: int = FORMAT
    run: str
    attempt: str
    version: int
    base_model: str
    base_model_digest: str
    created_unix_s: float
    live: list[str]
    lora: LoraFacts
    files: list[CommitFile]

    @property
    def adapter(self) -> AdapterId:
        digest = adapter_digest({file.name: file.sha256 for file in self.files})
        return AdapterId(run=self.run, attempt=self.attempt, version=self.version, digest=digest)

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def encode(commit: Commit, private_key: bytes) -> bytes:
    """The sealed bytes. Raises AdapterRefusedError for a commit that no reader would take."""
    _check(commit, commit.run)
    try:
        body = tomli_w.dumps(msgspec.to_builtins(commit)).encode()
    except UnicodeEncodeError as error:
        raise _refused("holds text that is not Unicode", "Rename the base model") from error
    signature = Ed25519PrivateKey.from_private_bytes(private_key).sign(_CONTEXT + body)
    seal = _SEAL.format(digest=hashlib.sha256(body).hexdigest(), signature=signature.hex())
    if len(body) + len(seal) > MAX_COMMIT_BYTES:
        raise _refused("is too large", "Shorten rank_pattern")
    return body + seal.encode()


def decode(data: bytes, *, run: str, public_key: bytes) -> Commit:
    """The commit, or AdapterRefusedError: cut, forged, foreign, newer, or pointing elsewhere."""
    body = _unsealed(data, public_key)
    try:
        row = tomllib.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not TOML: {error}", _REPUBLISH) from error
    found = row.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise _refused(
            f"has format {found}, and this agent reads up to {FORMAT}", "Update this agent"
        )
    try:
        commit = msgspec.convert(row, Commit)
    except msgspec.ValidationError as error:
        raise _refused(f"makes no sense: {error}", _REPUBLISH) from error
    _check(commit, run)
    return commit


def is_sealed(data: bytes) -> bool:
    """Whether the last bytes look like a seal; if not it was cut, or is still being written."""
    return _SEAL_RE.fullmatch(data[-_SEAL_BYTES:]) is not None


def _unsealed(data: bytes, public_key: bytes) -> bytes:
    """The body, once its digest and signature hold."""
    if len(data) > MAX_COMMIT_BYTES:
        raise _refused(f"has over {MAX_COMMIT_BYTES} bytes", "See who else writes to the bucket")
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    match = _SEAL_RE.fullmatch(seal)
    if match is None or not body:
        raise _refused("is cut: its seal is missing", _REPUBLISH)
    if hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise _refused("is corrupt: its digest does not match", _REPUBLISH)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(
            bytes.fromhex(match[2].decode()), _CONTEXT + body
        )
    except InvalidSignature as error:
        raise _refused(
            "is not signed with the run's key",
            "Compare the run's key in this host's join with the trainer's",
        ) from error
    return body


def _check(commit: Commit, run: str) -> None:
    if not is_run_name(commit.run) or commit.run != run:
        raise _refused(f"belongs to run {commit.run!r}, not {run!r}", "Give each run its own key")
    if commit.format != FORMAT or not is_attempt(commit.attempt):
        raise _refused("names an impossible format or attempt", _REPUBLISH)
    if not 0 <= commit.version <= _MAX_VERSION or not isfinite(commit.created_unix_s):
        raise _refused("names an impossible version or time", _REPUBLISH)
    _check_live(commit)
    _check_files(commit)


def _check_live(commit: Commit) -> None:
    names = [parse_name(name) for name in commit.live[: _MAX_LIVE + 1]]
    if len(names) > _MAX_LIVE or any(n is None or n.run != commit.run for n in names):
        raise _refused("its live names are too many or not of this run", _REPUBLISH)


def _check_files(commit: Commit) -> None:
    if tuple(sorted(file.name for file in commit.files)) != ADAPTER_FILES:
        raise _refused(f"must name exactly {' and '.join(ADAPTER_FILES)}", _REPUBLISH)
    folders = [
        adapter_folder(commit.attempt, commit.version, retry) for retry in range(MAX_RETRIES + 1)
    ]
    if not any(all(f.key == f"{folder}/{f.name}" for f in commit.files) for folder in folders):
        raise _refused("points to files outside its own folder", _REPUBLISH)
    for file in commit.files:
        if not 0 < file.size_bytes <= MAX_FILE_BYTES[file.name]:
            raise _refused(f"{file.name} has {file.size_bytes} bytes", "Train a smaller adapter")
        if _SHA256_RE.fullmatch(file.sha256) is None:
            raise _refused(f"the sha256 of {file.name} is none", _REPUBLISH)


def _refused(what: str, fix: str) -> AdapterRefusedError:
    return AdapterRefusedError(what, where="commit", fix=fix)
