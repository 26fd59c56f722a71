"""What keeps a training run from starting, in the words that the agent shows to its user.

The agent reads the last line of standard output as JSON, so `report` must be the last thing that
prints there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

EXIT_CONFIG: Final = 78  # EX_CONFIG of sysexits.h: starting again would not help


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`what` is wrong, `where` (key, file) and how to `fix` it."""

    what: str
    where: str = ""
    fix: str = ""


class RefusedError(Exception):
    """The run cannot start as configured; carries every problem that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.what for problem in problems))
        self.problems = list(problems)


def report(problems: Iterable[Problem]) -> None:
    """Print the problems as the one line that the agent reads."""
    print(error_line(problems), flush=True)


def error_line(problems: Iterable[Problem]) -> str:
    return json.dumps({"error": {"problems": [asdict(problem) for problem in problems]}})


def unknown_names(
    given: Iterable[str], known: Iterable[str], *, section: str, owner: str
) -> list[Problem]:
    """One problem for each name that `owner` does not have, with the nearest one that it has."""
    names = sorted(known)
    return [
        Problem(
            what=f"{owner} has no field {name!r}",
            where=f"{section}.{name}",
            fix=_nearest(name, names),
        )
        for name in sorted(set(given) - set(names))
    ]


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"


def from_exception(error: BaseException, *, where: str, fix: str = "") -> Problem:
    """A failure of somebody else's code, told by its type and first line."""
    lines: list[Any] = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Problem(what=text, where=where, fix=fix)
