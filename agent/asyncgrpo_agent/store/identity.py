"""Who is who, in files of the state folder: the proxy's CA, tokens, attempts, and run keys.

    <state>/proxy/{ca.pem,ca.key,server.pem,server.key}   tokens.json   attempts.json
    <state>/runs/<name>/{run.key,run.pub}                 raw Ed25519 keys in hex

Secrets are files of mode 0600 in folders of mode 0700; one that others can read is refused.
`store.private_files` says how they are written, `store.tokens` what is known of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.core.join import Join, JoinRole, encode
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.certificates import make_ca
from asyncgrpo_agent.store.private_files import (
    locked,
    private_folder,
    read_json,
    read_secret,
    write,
    write_json,
)
from asyncgrpo_agent.store.tokens import create_token

KEY_BYTES: Final = 32


# --- the proxy's certificate authority -------------------------------------------------------


def ensure_ca(state_dir: Path, now: datetime) -> tuple[bytes, bytes]:
    """The CA's certificate and key, PEM; made on first use."""
    folder = private_folder(state_dir / "proxy")
    certificate, key = folder / "ca.pem", folder / "ca.key"
    with locked(folder):
        # A lost key is an error, not a new CA: every join line carries the old certificate.
        if not certificate.exists():
            made, made_key = make_ca("asyncgrpo-agent proxy CA", now=now)
            write(key, made_key)
            write(certificate, made)  # last: its presence says that both were there
    return certificate.read_bytes(), read_secret(key)


def save_server_certificate(state_dir: Path, chain: bytes, key: bytes) -> tuple[Path, Path]:
    """Keep the listener's certificate where OpenSSL can read it; gives both paths."""
    folder = private_folder(state_dir / "proxy")
    write(folder / "server.pem", chain)
    write(folder / "server.key", key)
    return folder / "server.pem", folder / "server.key"


# --- runs ------------------------------------------------------------------------------------


def create_run(state_dir: Path, name: str) -> None:
    """Make the run's signing key. ConfigError if the run is there already or the name is none."""
    if not is_run_name(name):
        raise ConfigError(
            f"{name!r} cannot name a run",
            fix="Use lower-case letters, digits and '-', at most 63, beginning with no '-'",
        )
    folder = private_folder(state_dir / "runs" / name)
    if (folder / "run.key").exists():
        raise ConfigError(
            f"run {name!r} exists already",
            where=str(folder),
            fix="Take another name; its key must not be replaced while replicas trust it",
        )
    private = Ed25519PrivateKey.generate()
    write(folder / "run.pub", private.public_key().public_bytes_raw().hex().encode() + b"\n")
    write(folder / "run.key", private.private_bytes_raw().hex().encode() + b"\n")


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
    return public, _key(folder / "run.key", read_secret(folder / "run.key"))


def _key(path: Path, text: bytes) -> bytes:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("does not hold a key", where=str(path), fix="Restore it from a backup")
    return key


# --- joins -----------------------------------------------------------------------------------


def create_join(
    state_dir: Path,
    *,
    role: JoinRole,
    run: str,
    addresses: Sequence[str],
    now_unix_s: float,
    life_s: float | None = None,
    uses: int | None = None,
) -> str:
    """Mint a token for `role` in `run` and give the join line that carries it.

    It is good for `life_s` seconds and `uses` processes; None means without end.
    """
    if not addresses:
        raise ConfigError(
            "no address for agents to dial",
            where="proxy.public_addresses",
            fix="Give one: --address HOST:PORT",
        )
    public, private = _run_keys(state_dir, run, role)
    ca_pem, _ = ensure_ca(state_dir, datetime.fromtimestamp(now_unix_s, UTC))
    token = create_token(
        state_dir, role=role, run=run, now_unix_s=now_unix_s, life_s=life_s, uses=uses
    )
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


# --- attempts --------------------------------------------------------------------------------


def highest_attempt(state_dir: Path, run: str) -> int:
    """The largest attempt that was ever issued for the run; 0 for none."""
    return int(read_json(state_dir / "proxy" / "attempts.json", {}).get(run, 0))


def next_attempt(state_dir: Path, run: str, *, seen: int) -> int:
    """Issue one more than any issued or `seen`; it is on disk before it is given out."""
    path = private_folder(state_dir / "proxy") / "attempts.json"
    with locked(path.parent):
        attempts = read_json(path, {})
        attempts[run] = max(int(attempts.get(run, 0)), seen) + 1
        write_json(path, attempts)
    return int(attempts[run])
