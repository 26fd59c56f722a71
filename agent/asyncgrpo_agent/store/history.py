"""A run's history on this host: one JSON object a line, appended, each with its wall-clock time.

Written by the trainer's agent alone. A line is written in one call, so a reader that follows the
file sees whole lines but for a last one that a full disk cut short.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

PIECE_BYTES: Final = 32 << 10
MAX_LINE_BYTES: Final = 256 << 10
_NAME_BYTES: Final = 4096


class History:
    """Appends to one file. `now_unix_s` is passed in with each record."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # what a full disk refused is not kept

    def record(self, kind: str, now_unix_s: float, /, **fields: object) -> None:
        line = {"t": round(now_unix_s, 3), "kind": kind, **fields}
        self._file.write((json.dumps(line, default=str) + "\n").encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All whole records of a history. A line that was cut may have another behind it."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Records of a history between two places in its file; `start` is that which was asked for."""

    start: int
    end: int
    records: list[dict[str, Any]]


def name_of(path: Path) -> str:
    """Tells this history from another of the same path; "" while nothing is in it."""
    try:
        with path.open("rb") as file:
            first, newline, _ = file.read(_NAME_BYTES).partition(b"\n")
    except FileNotFoundError:
        return ""
    return hashlib.sha256(first).hexdigest()[:16] if newline else ""


def read_piece(path: Path, start: int) -> Piece:
    """Whole lines from `start` on, about PIECE_BYTES of them; none if there are none yet."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(PIECE_BYTES)
        if data and b"\n" not in data:
            data += file.read(MAX_LINE_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) >= MAX_LINE_BYTES:  # nobody writes such a line: pass it by
        return Piece(start=start, end=start + len(data), records=[])
    records: list[dict[str, Any]] = []
    for line in whole.splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return Piece(start=start, end=start + len(whole), records=records)
