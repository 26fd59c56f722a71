"""The run's history on its way into the bucket, where it outlives this host.

What was recorded is copied in the background, as a segment a minute and one at the end. It is read
from the history file, so that nothing is lost while the bucket is away, and every attempt goes on
where the bucket's copy of that file ends. Adapters go first. Nothing here is an error of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.core import segments
from asyncgrpo_agent.core.segments import SEGMENT_BYTES, SegmentKey
from asyncgrpo_agent.errors import StoreError
from asyncgrpo_agent.logs import Log, without_secrets
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store import history

log = Log(__name__)

FINISH_S: Final = 10.0  # at most, at the end of an attempt
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of the history file and the lines of it that are copied."""

    start: int
    end: int
    lines: list[str]


@dataclass(slots=True)
class HistoryMirror:
    """Of one attempt. `secrets` are values that must not be copied, in whatever record they are."""

    path: Path
    run_name: str
    link: TrainerLink
    bucket: BucketHost
    turns: Turns
    secrets: Sequence[str] = ()
    every_s: float | None = None  # None: as `segments.wait_s` says
    _at: int = _UNKNOWN  # where the bucket's copy ends
    _number: int = 0
    _unwritten: Span | None = None  # one that the bucket may have, or not
    _attempt: str = ""
    _is_told: bool = False  # that the bucket fails

    async def run(self) -> None:
        """For ever. What is being written when it is cancelled comes to its end."""
        if not self.link.attempt:
            await self.link.registered()
        began = trio.current_time()
        while True:
            wait_s = segments.wait_s(trio.current_time() - began)
            await trio.sleep(wait_s if self.every_s is None else self.every_s)
            await self._mirror(is_ending=False)

    async def finish(self, limit_s: float) -> None:
        """When the attempt has ended, `run` too. Whatever cancels the caller has to wait."""
        if not self.link.attempt:
            return
        with trio.move_on_after(min(limit_s, FINISH_S), shield=True) as limit:
            await self._mirror(is_ending=True)
        if limit.cancelled_caught:
            log.warning("history.unmirrored", reason="the time for it is over")

    async def _mirror(self, *, is_ending: bool) -> None:
        """All that is not copied yet."""
        try:
            while await self._write_next(is_ending):
                self._is_told = False
        except (StoreError, OSError) as error:
            level = log.debug if self._is_told and not is_ending else log.warning
            level("history.unmirrored", reason=str(error))
            self._is_told = True

    async def _write_next(self, is_ending: bool) -> bool:
        """One segment; False if there is nothing to be copied."""
        name = await trio.to_thread.run_sync(history.name_of, self.path)
        if not name:
            return False
        if self._attempt != self.link.attempt or self._at == _UNKNOWN:
            await self._find_end(name, is_ending)
        span = self._unwritten
        if span is None:
            span = await trio.to_thread.run_sync(self._read)
        if not span.lines:
            self._at = span.end
            return False
        data = segments.encode(
            span.lines,
            history=name,
            start=span.start,
            end=span.end,
            run=self.run_name,
            attempt=self._attempt,
        )
        self._unwritten = span  # the same again, under another name, until one is known to be there
        await self.turns.upkeep()
        with trio.CancelScope(shield=not is_ending):
            key = await self.bucket.write_segment(self._attempt, self._number, data)
            self._unwritten, self._at = None, span.end
            self._number += 1
        log.debug("history.mirrored", key=key, bytes=len(data), records=len(span.lines))
        return True

    # --- where to go on -------------------------------------------------------------------

    async def _find_end(self, name: str, is_ending: bool) -> None:
        """The newest segment of each attempt says how far it came, and with which history."""
        self._attempt = self.link.attempt
        await self.turns.upkeep()
        with trio.CancelScope(shield=not is_ending):
            keys = await self.bucket.list_segments()
        mine = [key.number for key in keys if key.attempt == self._attempt]
        self._number = max(mine, default=-1) + 1
        self._at = await self._end_of(name, keys, is_ending)
        if self._at > await trio.to_thread.run_sync(lambda: self.path.stat().st_size):
            self._at = 0  # another file that begins alike

    async def _end_of(self, name: str, keys: Sequence[SegmentKey], is_ending: bool) -> int:
        passed: set[str] = set()
        for key in reversed(keys):
            if key.attempt in passed:
                continue
            await self.turns.upkeep()
            with trio.CancelScope(shield=not is_ending):
                (data,) = await self.bucket.read_segments([key])
            segment = segments.decode(data)
            if segment is None or not segment.is_whole:
                continue
            if segment.history == name:
                return segment.end
            passed.add(key.attempt)
        return 0

    def _read(self) -> Span:
        """What comes next in the file, a segment of it at most."""
        lines: list[str] = []
        start = at = self._at
        size_bytes = 0
        while size_bytes < SEGMENT_BYTES:
            piece = history.read_piece(self.path, at)
            if piece.end == at:
                break
            at = piece.end
            for record in piece.records:
                if (line := segments.line_of(record)) is not None:
                    lines.append(self._shown(line))
                    size_bytes += len(line)
        return Span(start=start, end=at, lines=lines)

    def _shown(self, line: str) -> str:
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return without_secrets(line)
