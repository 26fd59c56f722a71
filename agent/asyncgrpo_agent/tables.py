"""Rows as text that lines up on a terminal; the same rows go out as JSON elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[dict[str, Any]], empty: str, notes: Sequence[str] = ()) -> str:
    """Columns as wide as what is in them, a dash for what has no value; `notes` come last."""
    lines = [[name.replace("_", " ") for name in rows[0]]] if rows else [[empty]]
    lines += [["-" if cell in (None, "") else str(cell) for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*padded, *notes]) + "\n"
