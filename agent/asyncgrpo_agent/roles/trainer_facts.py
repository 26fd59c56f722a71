"""The run's history on its way to the proxy, for those who look on.

What is sent is read from the history file, so that a proxy which was away, or has forgotten all,
gets what it missed. Pieces are small and wait for one another: what the sync has to say never
stands behind more than one of them for long. A proxy that takes none is sent none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.store import history
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

LOOK_EVERY_S: Final = 1.0
PACE_S: Final = 0.02  # between pieces: 1.6 MB/s at most
_RUN: Final = ("phase", "started", "resumed", "restarting", "ended", "totals", "error", "eval")
_KINDS: Final = frozenset(("metrics", "sync", "ack", "replica", "setup", "limits", *_RUN))


@dataclass(slots=True)
class FactsTeller:
    """Follows the history at `path`."""

    path: Path
    link: TrainerLink
    _wake: trio.Event = field(default_factory=trio.Event)
    _turn: trio.Lock = field(default_factory=trio.Lock)
    _registration: int = 0  # the one that `_at` is about
    _at: int = 0  # place in the file
    _past: int = 0  # what lies before it was written before the registration

    def wake(self) -> None:
        """Something was recorded."""
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.link.registered()
            if not await self._tell_more():
                with trio.move_on_after(LOOK_EVERY_S):
                    await self._wake.wait()
                self._wake = trio.Event()
            else:
                await trio.sleep(PACE_S)

    async def flush(self) -> None:
        """Send all that is recorded, as far as the link takes it."""
        while await self._tell_more():
            pass

    async def _tell_more(self) -> bool:
        """Send the next piece; False if there is none, or nobody to take it."""
        async with self._turn:
            try:
                return await self._tell_piece()
            except OSError as error:
                log.warning("history.unread", file=str(self.path), reason=str(error))
                return False

    async def _tell_piece(self) -> bool:
        known = self.link.facts_known
        name = await trio.to_thread.run_sync(history.name_of, self.path)
        if known is None or not name:
            return False
        if self._registration != self.link.registrations:
            self._registration = self.link.registrations
            self._at = known.get(name, 0)
            self._past = self.path.stat().st_size
        piece = await trio.to_thread.run_sync(history.read_piece, self.path, self._at)
        if piece.end == piece.start:
            return False
        facts = m.Facts(
            history=name,
            start=piece.start,
            end=piece.end,
            records=[record for record in piece.records if record.get("kind") in _KINDS],
            is_past=piece.end <= self._past,
        )
        if not await self.link.tell(facts) or self._registration != self.link.registrations:
            return False
        self._at = piece.end
        return True
