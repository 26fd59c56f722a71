"""Server-sent events, read as they come in.

The part of the HTML standard's "Interpreting an event stream" that our proxy uses: `event`, `data`,
`id` and comments, with lines that end in a line feed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

MAX_EVENT_BYTES: Final = 4 << 20


class ServerEvent(NamedTuple):
    """One of them; `id` is "" where it has none."""

    kind: str
    data: str
    id: str


@dataclass(slots=True)
class EventReader:
    """Bytes in, whole events out. Raises ValueError for one that is too long or no UTF-8."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of over {MAX_EVENT_BYTES} bytes")
        found = (_event(block.decode()) for block in whole)
        return [one for one in found if one is not None]


def _event(block: str) -> ServerEvent | None:
    fields: dict[str, list[str]] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        if name:
            fields.setdefault(name, []).append(value.removeprefix(" "))
    if "data" not in fields:
        return None
    kind, number = fields.get("event", ["message"])[-1], fields.get("id", [""])[-1]
    return ServerEvent(kind, "\n".join(fields["data"]), number)
