"""The syncs of a run by replica and phase, the newest two thousand.

What is told of a sync comes in any order and more than once: from replicas, from the proxy's own
count, from the trainer's history. The newest rows are objects, because replicas that were late
still add to them; older ones are packed, for 2,000 syncs of 50 replicas would take 100 MB else.

Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from asyncgrpo_agent.core.adapters import parse_name

MAX_SYNCS: Final = 2000
OPEN_SYNCS: Final = 32
MAX_PHASES: Final = 16
MAX_REASON_CHARACTERS: Final = 300

PhasesS = Mapping[str, float]


class ReplicaSync(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's part in a sync; its phases are in the order in which they came."""

    name: str
    ok: bool
    reason: str = ""
    since_announced_s: float | None = None
    phases_s: dict[str, float] = {}


class SyncRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sync. None where it is not known, or not yet."""

    version: int
    adapter: str
    digest: str
    started_unix_s: float | None = None
    elapsed_s: float | None = None  # of TRL's load call
    quorum_s: float | None = None  # from the announcement until enough held it
    bytes: int = 0
    timed_out: bool = False
    reason: str = ""
    trainer_phases_s: dict[str, float] = {}
    replicas: list[ReplicaSync] = []

    @property
    def is_done(self) -> bool:
        return self.elapsed_s is not None or self.quorum_s is not None


_ROW: Final = msgspec.msgpack.Decoder(SyncRow)


class SyncLog:
    """By adapter, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, SyncRow] = {}
        self._packed: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._packed)

    @property
    def size_bytes(self) -> int:
        """Of what is packed."""
        return sum(map(len, self._packed.values()))

    def published(
        self, adapter: str, *, started_unix_s: float, size_bytes: int, phases_s: PhasesS
    ) -> SyncRow | None:
        row = self._row(adapter)
        if row is None or row.bytes:  # told again after a reconnect: it began earlier
            return row
        return self._change(
            adapter,
            started_unix_s=round(started_unix_s, 3),
            bytes=size_bytes,
            trainer_phases_s=_phases(phases_s),
        )

    def told(self, adapter: str, outcome: ReplicaSync) -> SyncRow | None:
        """A replica's outcome takes the place of an earlier one of it."""
        row = self._row(adapter)
        if row is None:
            return None
        outcome = msgspec.structs.replace(
            outcome,
            reason=outcome.reason[:MAX_REASON_CHARACTERS],
            phases_s=_phases(outcome.phases_s),
        )
        others = [one for one in row.replicas if one.name != outcome.name]
        return self._change(adapter, replicas=[*others, outcome])

    def decided(
        self, adapter: str, *, quorum_s: float, timed_out: bool, reason: str
    ) -> SyncRow | None:
        return self._change(
            adapter,
            quorum_s=round(quorum_s, 4),
            timed_out=timed_out,
            reason=reason[:MAX_REASON_CHARACTERS],
        )

    def ended(self, adapter: str, *, elapsed_s: float, ended_unix_s: float) -> SyncRow | None:
        row = self._row(adapter)
        if row is None:
            return None
        began = ended_unix_s - elapsed_s
        return self._change(adapter, elapsed_s=round(elapsed_s, 4), started_unix_s=round(began, 3))

    def find(self, *, before_version: int | None = None, limit: int = 100) -> list[SyncRow]:
        """Newest first."""
        found: list[SyncRow] = []
        for name in self._newest_first():
            parts = parse_name(name)
            if parts is None or (before_version is not None and parts.version >= before_version):
                continue
            if len(found) >= limit:
                break
            found.append(self._open.get(name) or self._unpacked(name))
        return found

    def _newest_first(self) -> Iterable[str]:
        yield from reversed(self._open)
        yield from reversed(self._packed)

    def _row(self, adapter: str) -> SyncRow | None:
        """A new row for an adapter that is new; None for what is no adapter's name, or old."""
        if (row := self._open.get(adapter)) is not None:
            return row
        parts = parse_name(adapter)
        if parts is None:
            return None
        if adapter in self._packed:
            return self._unpacked(adapter)
        row = self._open[adapter] = SyncRow(
            version=parts.version, adapter=adapter, digest=parts.digest
        )
        while len(self._open) > OPEN_SYNCS:
            name = next(iter(self._open))
            self._pack(self._open.pop(name))
        while len(self) > MAX_SYNCS:
            del self._packed[next(iter(self._packed))]
        return row

    def _change(self, adapter: str, **fields: object) -> SyncRow | None:
        row = self._row(adapter)
        if row is None:
            return None
        row = msgspec.structs.replace(row, **fields)
        if adapter in self._open:
            self._open[adapter] = row
        else:
            self._pack(row)
        return row

    def _pack(self, row: SyncRow) -> None:
        self._packed[row.adapter] = zlib.compress(msgspec.msgpack.encode(row), 1)

    def _unpacked(self, adapter: str) -> SyncRow:
        return _ROW.decode(zlib.decompress(self._packed[adapter]))


def _phases(phases_s: PhasesS) -> dict[str, float]:
    return {name[:32]: round(value, 4) for name, value in list(phases_s.items())[:MAX_PHASES]}
