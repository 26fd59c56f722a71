"""Files that hold secrets or promises: for their owner alone, replaced in one step, synced.

A crash leaves the old file or the new one. What is read, changed and written back is `locked`
meanwhile, because commands run beside the proxy and beside each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncgrpo_agent.errors import ConfigError


def private_folder(path: Path) -> Path:
    """`path`, made with mode 0700 if it is not there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing `folder`. Held for milliseconds; not reentrant."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # closing it, by whatever end, lets go
        yield
    finally:
        os.close(descriptor)


def is_writable(folder: Path) -> bool:
    """Whether a file can be made and written there now: the disk may be full, or read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(64))
            file.flush()
    except OSError:
        return False
    return True


def write(path: Path, data: bytes) -> None:
    """Replace `path` by a file of mode 0600."""
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


def read_secret(path: Path) -> bytes:
    """The content of a file that nobody else can read. Raises ConfigError."""
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


def write_json(path: Path, value: object) -> None:
    write(path, json.dumps(value, indent=1).encode() + b"\n")


def read_json(path: Path, default: Any) -> Any:
    """What `write_json` wrote, or `default` if there is no file. Raises ConfigError."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"does not parse: {error}", where=str(path), fix="Restore it from a backup")
