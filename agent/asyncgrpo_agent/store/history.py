"""A run's history on this host: one JSON object a line, appended, each with its wall-clock time.

Written by the trainer's agent alone. A line is written in one call, so a reader that follows the
file sees whole lines but for a last one that a full disk cut short.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self


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
