"""packaging/SECURITY.md: every test that it names is there, and every row names one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "packaging" / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 30
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if not re.search(rf"^(async )?def {name}\(", read(file), re.MULTILINE)
    ]
    assert missing == []


def test_every_row_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    bare = [row for row in rows if "`tests/" not in row and not row.startswith("| attack")]
    assert bare == []


def read(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""
