"""Whose turn it is at the bucket, which takes one call at a time: publications go first.

Upkeep, that is pruning and the copies of checkpoints, asks before each of its calls, which are
short, and waits for as long as an adapter is being published. Nothing is ever interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio


@dataclass(slots=True)
class Turns:
    """Shared by all of one trainer that use the bucket."""

    _publishing: int = 0
    _freed: trio.Event = field(default_factory=trio.Event)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """While an adapter is on its way, tries that failed included."""
        self._publishing += 1
        try:
            yield
        finally:
            self._publishing -= 1
            if not self._publishing:
                self._freed.set()
                self._freed = trio.Event()

    async def upkeep(self) -> None:
        """Wait until no adapter is on its way. A checkpoint in any case."""
        await trio.lowlevel.checkpoint()
        while self._publishing:
            await self._freed.wait()
