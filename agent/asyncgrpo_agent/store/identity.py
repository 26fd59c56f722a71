"""Who is who, in files of the state folder: the proxy's CA, tokens, attempts, and run keys.

    <state>/proxy/{ca.pem,ca.key,server.pem,server.key}   tokens.json   attempts.json
    <state>/runs/<name>/{run.key,run.pub}                 raw Ed25519 keys in hex

Secrets are files of mode 0600 in folders of mode 0700; one that others can read is refused. Every
file is replaced in one step, so a crash leaves the old or the new one. What is read, changed and
written back is locked meanwhile, because commands run beside the proxy and beside each other.

Tokens are random 256-bit values of which only the sha256 is stored. A slow hash would add nothing:
it protects secrets that can be guessed, and these cannot.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.core.join import Join, JoinRole, encode
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.certificates import make_ca

TOKEN_BYTES: Final = 32
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """What a token allows: one role in one run."""

    role: str
    run: str
    created_unix_s: float


# --- the proxy's certificate authority -------------------------------------------------------


def ensure_ca(state_dir: Path, now: datetime) -> tuple[bytes, bytes]:
    """The CA's certificate and key, PEM; made on first use."""
    folder = _folder(state_dir / "proxy")
    certificate, key = folder / "ca.pem", folder / "ca.key"
    with _locked(folder):
        # A lost key is an error, not a new CA: every join line carries the old certificate.
        if not certificate.exists():
            made, made_key = make_ca("asyncgrpo-agent proxy CA", now=now)
            _write(key, made_key)
            _write(certificate, made)  # last: its presence says that both were there
    return certificate.read_bytes(), _read_secret(key)


def save_server_certificate(state_dir: Path, chain: bytes, key: bytes) -> tuple[Path, Path]:
    """Keep the listener's certificate where OpenSSL can read it; gives both paths."""
    folder = _folder(state_dir / "proxy")
    _write(folder / "server.pem", chain)
    _write(folder / "server.key", key)
    return folder / "server.pem", folder / "server.key"


# --- runs ------------------------------------------------------------------------------------


def create_run(state_dir: Path, name: str) -> None:
    """Make the run's signing key. ConfigError if the run is there already or the name is none."""
    if not is_run_name(name):
        raise ConfigError(
            f"{name!r} cannot name a run",
            fix="Use lower-case letters, digits and '-', at most 63, beginning with no '-'",
        )
    folder = _folder(state_dir / "runs" / name)
    if (folder / "run.key").exists():
        raise ConfigError(
            f"run {name!r} exists already",
            where=str(folder),
            fix="Take another name; its key must not be replaced while replicas trust it",
        )
    private = Ed25519PrivateKey.generate()
    _write(folder / "run.pub", private.public_key().public_bytes_raw().hex().encode() + b"\n")
    _write(folder / "run.key", private.private_bytes_raw().hex().encode() + b"\n")


def ensure_run(state_dir: Path, name: str) -> None:
    """`create_run` unless it was done."""
    if not (state_dir / "runs" / name / "run.key").exists():
        create_run(state_dir, name)


def _run_keys(state_dir: Path, name: str, role: JoinRole) -> tuple[bytes, bytes | None]:
    """Public and private key; a replica has no business with the private one."""
    folder = state_dir / "runs" / name
    if not is_run_name(name) or not (folder / "run.pub").exists():
        raise ConfigError(
            f"run {name!r} is not known here",
            where=str(folder),
            fix=f"Make it first: asyncgrpo-agent run create {name}",
        )
    public = _key(folder / "run.pub", (folder / "run.pub").read_bytes())
    if role == "replica":
        return public, None
    return public, _key(folder / "run.key", _read_secret(folder / "run.key"))


def _key(path: Path, text: bytes) -> bytes:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("does not hold a key", where=str(path), fix="Restore it from a backup")
    return key


# --- tokens ----------------------------------------------------------------------------------


def create_join(
    state_dir: Path,
    *,
    role: JoinRole,
    run: str,
    addresses: Sequence[str],
    now_unix_s: float,
) -> str:
    """Mint a token for `role` in `run` and give the join line that carries it."""
    if not addresses:
        raise ConfigError(
            "no address for agents to dial",
            where="proxy.public_addresses",
            fix="Give one: --address HOST:PORT",
        )
    public, private = _run_keys(state_dir, run, role)
    ca_pem, _ = ensure_ca(state_dir, datetime.fromtimestamp(now_unix_s, UTC))
    token = secrets.token_urlsafe(TOKEN_BYTES)
    row = {"sha256": _hash(token), "role": role, "run": run, "created_unix_s": now_unix_s}
    path = state_dir / "proxy" / "tokens.json"
    with _locked(path.parent):
        _write_json(path, [*_read_json(path, []), row])
    return encode(
        Join(
            addresses=tuple(addresses),
            ca_der=x509.load_pem_x509_certificate(ca_pem).public_bytes(Encoding.DER),
            token=token,
            role=role,
            run=run,
            run_public_key=public,
            run_private_key=private,
        )
    )


def check_token(state_dir: Path, token: str) -> TokenFacts | None:
    """What this token allows, or None. Reads the file anew, so that changes count at once."""
    wanted = _hash(token)
    found: TokenFacts | None = None
    for row in _read_json(state_dir / "proxy" / "tokens.json", []):
        if hmac.compare_digest(row["sha256"], wanted):
            found = TokenFacts(
                role=row["role"], run=row["run"], created_unix_s=row["created_unix_s"]
            )
    return found


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


# --- attempts --------------------------------------------------------------------------------


def highest_attempt(state_dir: Path, run: str) -> int:
    """The largest attempt that was ever issued for the run; 0 for none."""
    return int(_read_json(state_dir / "proxy" / "attempts.json", {}).get(run, 0))


def next_attempt(state_dir: Path, run: str, *, seen: int) -> int:
    """Issue one more than any issued or `seen`; it is on disk before it is given out."""
    path = _folder(state_dir / "proxy") / "attempts.json"
    with _locked(path.parent):
        attempts = _read_json(path, {})
        attempts[run] = max(int(attempts.get(run, 0)), seen) + 1
        _write_json(path, attempts)
    return int(attempts[run])


# --- files -----------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing `folder`. Held for milliseconds; not reentrant."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # closing it, by whatever end, lets go
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the new name itself: an attempt must not be issued twice
    finally:
        os.close(folder)


def _read_secret(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ConfigError("is missing", where=str(path), fix="Restore it from a backup") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"can be read by others (mode {stat.S_IMODE(mode):04o})",
            where=str(path),
            fix=f"chmod 600 {path}",
        )
    return path.read_bytes()


def _write_json(path: Path, value: object) -> None:
    _write(path, json.dumps(value, indent=1).encode() + b"\n")


def _read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise ConfigError(
            f"does not parse: {error}", where=str(path), fix="Restore it from a backup"
        ) from error
