"""Where scripts/build puts the frozen agent, in its two forms."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

DIST: Final = Path(__file__).parents[2] / "dist"
FORMS: Final = {
    "one-file": DIST / "onefile" / "asyncgrpo-agent",
    "one-folder": DIST / "onedir" / "asyncgrpo-agent",
}


def built(form: str) -> Path:
    """The program; the test is skipped if it was not built."""
    if not FORMS[form].exists():
        pytest.skip(f"{FORMS[form].relative_to(DIST.parent)} is not there: run scripts/build")
    return FORMS[form]
