"""Hiding secrets in whatever of the configuration is shown to people.

Names and URLs decide; a value that looks harmless under a harmless name is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_SECRET_NAME = re.compile(
    r"(^|[_-])(token|key|secret|passwd|password|credentials?|auth)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"://[^/\s]*@")  # a URL with a password
REDACTED: Final = "***"


def is_secret(name: str, value: object) -> bool:
    """Whether a value must not be shown, going by its name or, for URLs, by its look."""
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(str(value)))


def redact(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: redact(value)
        if isinstance(value, dict)
        else (REDACTED if value and is_secret(name, value) else value)
        for name, value in table.items()
    }


def redact_args(args: Sequence[str]) -> list[str]:
    """Command-line words with the values of secret flags replaced."""
    shown: list[str] = []
    hide_next = False
    for word in args:
        flag, equals, value = word.partition("=")
        if hide_next or (not word.startswith("-") and is_secret("", word)):
            shown.append(REDACTED)
        elif equals and is_secret(flag, value):
            shown.append(f"{flag}={REDACTED}")
        else:
            shown.append(word)
        hide_next = word.startswith("-") and not equals and is_secret(flag, "")
    return shown
