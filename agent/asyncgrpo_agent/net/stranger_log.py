"""Log lines about peers that have not proved who they are: strangers decide how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

QUIET_S: Final = 10.0

Severity = Callable[..., None]  # a method of a `Log`


class StrangerLog:
    """One line in ten seconds for each event and kind; the next one counts those held back.

    No kind may be in a stranger's own words, of which there is no end.
    """

    def __init__(self) -> None:
        # (event, kind) -> time of the last line, lines held back since
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}

    def note(self, severity: Severity, event: str, kind: str, /, **fields: object) -> None:
        now = trio.current_time()
        last, held_back = self._lines.get((event, kind), (-QUIET_S, 0))
        if now - last < QUIET_S:
            self._lines[event, kind] = (last, held_back + 1)
            return
        self._lines[event, kind] = (now, 0)
        severity(event, **fields, held_back=held_back)
