"""Write train.jsonl and heldout.jsonl beside this file: `python make_data.py`. Deterministic."""

from __future__ import annotations

import json
from pathlib import Path

from sums import Row, split


def main() -> None:
    here = Path(__file__).parent
    for name, rows in zip(("train", "heldout"), split(), strict=True):
        (here / f"{name}.jsonl").write_text(lines(rows))


def lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
