"""What happened in a run, one sentence each, the newest ten thousand.

Pure. Numbers grow by one and never come again: a proxy that starts begins above all that an earlier
one gave, so that whoever asks for what came after a number is never told half of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

MAX_EVENTS: Final = 10_000
MAX_TEXT_CHARACTERS: Final = 400
MAX_FIELDS: Final = 12

Kind = Literal["replica", "trainer", "sync", "run", "alert", "proxy", "security"]
Severity = Literal["info", "warning", "error"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One of them. `name` is stable, as in logs; `duration_s` is of what ended with it."""

    seq: int
    t_unix_s: float
    kind: Kind
    severity: Severity
    name: str
    text: str
    replica: str | None = None
    duration_s: float | None = None
    fields: dict[str, Any] = {}


class EventLog:
    """The newest events, oldest first."""

    def __init__(self, first_seq: int = 1) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._next = first_seq

    def __len__(self) -> int:
        return len(self._events)

    @property
    def seq(self) -> int:
        """That of the newest event, also when none is there yet."""
        return self._next - 1

    def add(
        self,
        kind: Kind,
        severity: Severity,
        name: str,
        text: str,
        *,
        t_unix_s: float,
        replica: str | None = None,
        duration_s: float | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Event:
        event = Event(
            seq=self._next,
            t_unix_s=round(t_unix_s, 3),
            kind=kind,
            severity=severity,
            name=name,
            text=text[:MAX_TEXT_CHARACTERS],
            replica=replica,
            duration_s=None if duration_s is None else round(duration_s, 3),
            fields=_short(fields or {}),
        )
        self._next += 1
        self._events.append(event)
        return event

    def find(
        self, *, before_seq: int | None = None, limit: int = 200, kind: str = "", text: str = ""
    ) -> list[Event]:
        """Newest first. `text` may be anywhere in the sentence or the replica's name."""
        found: list[Event] = []
        wanted = text.casefold()
        for event in self._newest_first(before_seq):
            if kind and event.kind != kind:
                continue
            if wanted and wanted not in f"{event.text}\n{event.replica or ''}".casefold():
                continue
            found.append(event)
            if len(found) >= limit:
                break
        return found

    def since(self, seq: int) -> list[Event] | None:
        """Those after `seq`, oldest first; None if some of them may be lost."""
        oldest = self._events[0].seq if self._events else self._next
        if not oldest - 1 <= seq <= self.seq:
            return None
        found: list[Event] = []
        for event in reversed(self._events):
            if event.seq <= seq:
                break
            found.append(event)
        return found[::-1]

    def _newest_first(self, before_seq: int | None) -> Iterator[Event]:
        for event in reversed(self._events):
            if before_seq is None or event.seq < before_seq:
                yield event


def _short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As much of them as an event may take."""
    kept: dict[str, Any] = {}
    for name, value in list(fields.items())[:MAX_FIELDS]:
        plain = value is None or isinstance(value, (bool, int, float))
        kept[name] = value if plain else str(value)[:MAX_TEXT_CHARACTERS]
    return kept
