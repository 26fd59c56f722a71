"""The key by which a proxy knows this host again: `<state>/hosts/<run>.key`, Ed25519 in hex.

Made on first use, for one run, so that two runs cannot tell that they share a host. Whoever has a
copy can push this replica out, so it is a secret; without it the host joins under a suffixed name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.private_files import locked, private_folder, read_secret, write

_KEY_BYTES: Final = 32


def host_key_file(state_dir: Path, run: str) -> Path:
    return state_dir / "hosts" / f"{run}.key"


def ensure_host_key(state_dir: Path, run: str) -> Ed25519PrivateKey:
    """The key of this host in `run`. Raises ConfigError if it cannot be made or read."""
    path = host_key_file(state_dir, run)
    try:
        with locked(private_folder(path.parent)):
            if not path.exists():
                made = Ed25519PrivateKey.generate()
                write(path, made.private_bytes_raw().hex().encode() + b"\n")
            return _parse(path, read_secret(path))
    except OSError as error:
        raise ConfigError(
            f"the host key cannot be kept: {error.strerror or error}",
            where=str(path),
            fix="Make the state folder writable for this user, or choose another: --state-dir",
        ) from error


def _parse(path: Path, text: bytes) -> Ed25519PrivateKey:
    try:
        raw = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        raw = b""
    if len(raw) != _KEY_BYTES:
        raise ConfigError(
            "does not hold a host key",
            where=str(path),
            fix="Restore it from a backup, or delete it and join under a new name",
        )
    return Ed25519PrivateKey.from_private_bytes(raw)
