"""A run's history in its bucket: write-once segments of what the trainer has recorded.

    events/a0003-7f3c/000007.jsonl         a retry takes 000007-rN

A segment is a run of whole records of one history file, one JSON object a line, between a line that
says where in that file they begin and end, and one that says how many they are: a segment without
its last line was cut. Attempts on one host go on with one history; one on another host begins its
own. What is written twice, because an answer of the bucket was lost, is read once.

Nothing here is signed: whoever can write to the bucket can write history.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncgrpo_agent.core.adapters import MAX_RETRIES, is_attempt, parse_attempt

FOLDER: Final = "events"
SEGMENT_BYTES: Final = 2 << 20  # of records, about
MAX_SEGMENT_BYTES: Final = 4 << 20
MAX_RECORD_BYTES: Final = 64 << 10
EVERY_S: Final = 60.0
LONGEST_S: Final = 300.0
_SHARE: Final = 0.01  # of the time since the start, between two segments

_RUN: Final = ("about", "started", "resumed", "restarting", "ended", "totals", "error", "eval")
_COURSE: Final = ("phase", "setup", "limits", "origin", "checkpoint", "saved", "result")
_STEPS: Final = ("metrics", "traffic", "sync", "ack", "replica")
KINDS: Final = frozenset((*_RUN, *_COURSE, *_STEPS))
"""Of records that are copied. The rest is of use on the trainer's host only."""

_NAME_RE: Final = re.compile(
    r"(?P<number>\d{6}|[1-9]\d{6,8})(?:-r(?P<retry>[1-9]\d?))?\.jsonl", re.ASCII
)
_FIRST: Final = "segment"
_LAST: Final = "segment_end"


# --- keys ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class SegmentKey:
    """Where a segment is; ordered from old to new."""

    attempt_number: int
    attempt: str
    number: int
    retry: int

    @property
    def key(self) -> str:
        return segment_key(self.attempt, self.number, self.retry)


def segment_key(attempt: str, number: int, retry: int = 0) -> str:
    suffix = f"-r{retry}" if retry else ""
    return f"{FOLDER}/{attempt}/{number:06d}{suffix}.jsonl"


def parse_segment_name(attempt: str, name: str) -> SegmentKey | None:
    """The key of a segment from its name in the attempt's folder; None for any other name."""
    match = _NAME_RE.fullmatch(name)
    if match is None or not is_attempt(attempt):
        return None
    retry = int(match["retry"] or 0)
    if retry > MAX_RETRIES:
        return None
    return SegmentKey(parse_attempt(attempt).number, attempt, int(match["number"]), retry)


# --- contents --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`start` and `end` are places in the file of the `history`."""

    history: str
    start: int
    end: int
    records: list[dict[str, Any]]
    is_whole: bool


def encode(
    lines: Iterable[str], *, history: str, start: int, end: int, run: str, attempt: str
) -> bytes:
    """The bytes of a segment; each line is a record as JSON, without its line feed."""
    body = list(lines)
    first = {"kind": _FIRST, "history": history, "start": start, "end": end}
    last = {"kind": _LAST, "records": len(body)}
    whole = [_json(first | {"run": run, "attempt": attempt}), *body, _json(last)]
    return ("\n".join(whole) + "\n").encode()


def line_of(record: Mapping[str, Any]) -> str | None:
    """A record as a segment has it; None for one that is not copied."""
    if record.get("kind") not in KINDS:
        return None
    line = _json(record)
    return line if len(line) <= MAX_RECORD_BYTES else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def decode(data: bytes) -> Segment | None:
    """What a segment holds, also one that was cut; None for what is no segment."""
    whole = data[: data.rfind(b"\n") + 1]
    records = [record for line in whole.splitlines() if (record := _record(line)) is not None]
    if not records or records[0].get("kind") != _FIRST:
        return None
    first, rest = records[0], records[1:]
    history, start, end = first.get("history"), first.get("start"), first.get("end")
    if not (isinstance(history, str) and type(start) is int and type(end) is int):
        return None
    count = rest[-1].get("records") if rest and rest[-1].get("kind") == _LAST else None
    is_whole = count is not None and count == len(rest) - 1
    kept = [record for record in rest if record.get("kind") in KINDS]
    return Segment(history=history, start=start, end=end, records=kept, is_whole=is_whole)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- reading them one after another ----------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """What has been read of one history."""

    end: int = 0
    newest_t: float = 0.0
    cut_start: int = -1  # of a segment that was cut ...
    cut_records: int = 0  # ... and what was read of it


@dataclass(slots=True)
class Joined:
    """Segments put one behind the other, in the order of their keys."""

    _known: dict[str, _Known] = field(default_factory=dict)

    def add(self, segment: Segment) -> Iterator[dict[str, Any]]:
        """The records of it that were not read before."""
        known = self._known.setdefault(segment.history, _Known())
        records = segment.records
        if segment.start == known.cut_start:
            records = records[known.cut_records :]
        elif segment.start < known.end:
            records = [one for one in records if _time(one) > known.newest_t]
        if segment.is_whole:
            known.end, known.cut_start = max(known.end, segment.end), -1
        elif segment.start != known.cut_start or len(segment.records) > known.cut_records:
            known.cut_start, known.cut_records = segment.start, len(segment.records)
        for record in records:
            known.newest_t = max(known.newest_t, _time(record))
            yield record


def _time(record: Mapping[str, Any]) -> float:
    at = record.get("t")
    return float(at) if isinstance(at, (int, float)) else 0.0


# --- when ------------------------------------------------------------------------------------


def wait_s(since_start_s: float) -> float:
    """Until the next segment: the longer a run, the fewer a day, so that it stays quick to read."""
    return min(LONGEST_S, max(EVERY_S, _SHARE * since_start_s))
