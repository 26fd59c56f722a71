"""Which attempt last started on this host, and with what: who made the checkpoints that lie here.

Invariant: written before TRL of that attempt starts, so no checkpoint is older than the file says.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from asyncgrpo_agent.errors import StoreError

_FILE = "last-start.json"


class LastStart(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` as in `core.resumption`; `base_model_digest` is the model's identity."""

    attempt_number: int = 0
    base_model_digest: str = ""
    settings: dict[str, str] = {}


def read(folder: Path) -> LastStart:
    """All empty if nothing started here. A file that does not parse tells nothing either."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=LastStart)
    except (FileNotFoundError, msgspec.MsgspecError):
        return LastStart()


def write(folder: Path, start: LastStart) -> None:
    """Replace it in one step. Raises StoreError."""
    fresh = folder / f".{_FILE}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(start))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / _FILE)
    except OSError as error:
        raise StoreError(
            f"cannot write which attempt starts: {error.strerror}",
            where=str(folder),
            fix="Check free space and permissions of the state folder",
        ) from error
