"""Who is who, in files of the state folder: the proxy's CA, tokens, attempts, and run keys.

    <state>/proxy/{ca.pem,ca.key,server.pem,server.key}   tokens.json   attempts.json
    <state>/runs/<name>/{run.key,run.pub}                 raw Ed25519 keys in hex

A proxy needs a run's public key only; whoever has the private one can sign adapters. Secrets are
files of mode 0600 in folders of mode 0700; one that others can read is refused.
`store.private_files` says how they are written, `store.tokens` what is known of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.core.join import Join, JoinRole, decode, encode, with_run_key
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.audit import AuditLog
from asyncgrpo_agent.store.certificates import make_ca
from asyncgrpo_agent.store.private_files import (
    locked,
    private_folder,
    read_json,
    read_secret,
    write,
    write_json,
)
from asyncgrpo_agent.store.tokens import ALL_RUNS, create_token

KEY_BYTES: Final = 32
MAX_ATTEMPT_SEEN: Final = 100_000_000  # a tenth of the numbers that names have room for


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
            AuditLog(state_dir).record("ca.created", now.timestamp())
    return certificate.read_bytes(), read_secret(key)


def save_server_certificate(state_dir: Path, chain: bytes, key: bytes) -> tuple[Path, Path]:
    """Keep the listener's certificate where OpenSSL can read it; gives both paths."""
    folder = private_folder(state_dir / "proxy")
    write(folder / "server.pem", chain)
    write(folder / "server.key", key)
    return folder / "server.pem", folder / "server.key"


# --- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run that this host knows."""

    name: str
    public_key: bytes
    has_private_key: bool


def create_run(state_dir: Path, name: str) -> bytes:
    """Make the run's signing key; gives the public half. ConfigError if the run is there."""
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    folder = _run_folder(state_dir, name)
    with locked(folder):
        if (folder / "run.pub").exists():
            raise _exists(folder, "Take another name; its key must not change while it is trusted")
        write(folder / "run.key", _hex(private.private_bytes_raw()))
        write(folder / "run.pub", _hex(public))  # last: its presence says that all is there
    return public


def add_run(state_dir: Path, name: str, public_key: bytes) -> None:
    """Make known a run whose key was made on another host. ConfigError if it has another key."""
    folder = _run_folder(state_dir, name)
    with locked(folder):
        file = folder / "run.pub"
        if not file.exists():
            write(file, _hex(public_key))
        elif _key(file, file.read_bytes()) != public_key:
            raise _exists(folder, "It has another key; joins that were made here carry that one")


def ensure_run(state_dir: Path, name: str) -> None:
    """`create_run` unless it was done."""
    if not (state_dir / "runs" / name / "run.pub").exists():
        create_run(state_dir, name)


def list_runs(state_dir: Path) -> list[RunFacts]:
    """All runs that this host knows, by name."""
    files = sorted((state_dir / "runs").glob("*/run.pub"))
    return [
        RunFacts(
            name=file.parent.name,
            public_key=_key(file, file.read_bytes()),
            has_private_key=(file.parent / "run.key").exists(),
        )
        for file in files
    ]


def runs_exposed(state_dir: Path) -> list[str]:
    """Runs whose private key lies beside a proxy, which must then be trusted with adapters."""
    if not (state_dir / "proxy" / "ca.pem").exists():
        return []
    return sorted(file.parent.name for file in (state_dir / "runs").glob("*/run.key"))


def _run_folder(state_dir: Path, name: str) -> Path:
    if not is_run_name(name):
        raise ConfigError(
            f"{name!r} cannot name a run",
            fix="Use lower-case letters, digits and '-', at most 63, beginning with no '-'",
        )
    return private_folder(state_dir / "runs" / name)


def _exists(folder: Path, fix: str) -> ConfigError:
    return ConfigError(f"run {folder.name!r} exists already", where=str(folder), fix=fix)


def run_public_key(state_dir: Path, name: str) -> bytes:
    """The key that the run's adapters are signed with. ConfigError if this host has none."""
    file = state_dir / "runs" / name / "run.pub"
    if not is_run_name(name) or not file.exists():
        raise ConfigError(
            f"run {name!r} is not known here",
            where=str(file.parent),
            fix=f"Make it: asyncgrpo-agent run create {name}, on the trainer's machine if adapters"
            f" are to be safe from this one; then here: asyncgrpo-agent run add {name}"
            " --public-key KEY",
        )
    return _key(file, file.read_bytes())


def _private_key(state_dir: Path, name: str) -> bytes | None:
    """None where the run's key was made on another host."""
    file = state_dir / "runs" / name / "run.key"
    if not is_run_name(name) or not file.exists():
        return None
    return _key(file, read_secret(file))


def _hex(key: bytes) -> bytes:
    return key.hex().encode() + b"\n"


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
    rollouts: bool = False,
) -> str:
    """Mint a token for `role` in `run` and give the join line that carries it.

    A viewer's may be for `tokens.ALL_RUNS`, and shows sampled `rollouts` if it is to. It is good
    for `life_s` seconds and `uses` processes; None means without end. A trainer's has the run's
    private key only if that is on this host; `complete_join` adds it elsewhere.
    """
    if not addresses:
        raise ConfigError(
            "no address for agents to dial",
            where="proxy.public_addresses",
            fix="Give one: --address HOST:PORT",
        )
    public = b"" if run == ALL_RUNS else run_public_key(state_dir, run)
    private = _private_key(state_dir, run) if role == "trainer" else None
    ca_pem, _ = ensure_ca(state_dir, datetime.fromtimestamp(now_unix_s, UTC))
    token = create_token(
        state_dir,
        role=role,
        run=run,
        now_unix_s=now_unix_s,
        life_s=life_s,
        uses=uses,
        rollouts=rollouts,
    )
    join = Join(
        addresses=tuple(addresses),
        ca_der=x509.load_pem_x509_certificate(ca_pem).public_bytes(Encoding.DER),
        token=token,
        role=role,
        run=run,
        run_public_key=b"" if role == "viewer" else public,
    )
    return encode(join if private is None else with_run_key(join, private))


def complete_join(state_dir: Path, line: str) -> str:
    """The trainer's join line with the run's private key, which must be on this host."""
    join = decode(line)
    if join.role != "trainer":
        raise ConfigError(
            f"is for a {join.role}, which never signs adapters",
            where="the join line",
            fix="It is good as it is. The trainer's is another:"
            f" asyncgrpo-agent token create --role trainer --run {join.run}",
        )
    private = _private_key(state_dir, join.run)
    if private is None:
        raise ConfigError(
            f"the private key of run {join.run!r} is not on this host",
            where=str(state_dir / "runs"),
            fix=f"Do this where `asyncgrpo-agent run create {join.run}` ran, with the same"
            " --state-dir",
        )
    return encode(with_run_key(join, private))


# --- attempts --------------------------------------------------------------------------------


def highest_attempt(state_dir: Path, run: str) -> int:
    """The largest attempt that was ever issued for the run; 0 for none."""
    return int(read_json(state_dir / "proxy" / "attempts.json", {}).get(run, 0))


def next_attempt(state_dir: Path, run: str, *, seen: int) -> int:
    """Issue one more than any issued or `seen`; it is on disk before it is given out.

    `seen` is hearsay: no number that an agent names may use up those that are left.
    """
    path = private_folder(state_dir / "proxy") / "attempts.json"
    with locked(path.parent):
        attempts = read_json(path, {})
        attempts[run] = max(int(attempts.get(run, 0)), min(seen, MAX_ATTEMPT_SEEN)) + 1
        write_json(path, attempts)
    return int(attempts[run])
