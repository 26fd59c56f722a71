"""Rollouts that wait in the proxy because no replica can take them now: in order, and bounded.

Each run has a queue of its own, so none can fill another's, and replicas serve one run each. Within
a run whoever came first for an adapter is served first: a newcomer does not take the place that
became free for one who waits. A full queue refuses what comes, and says when to ask again.

Rollouts of low priority, an evaluation's, go behind all others, but not for ever: while some always
wait there would be no evaluation. After `LOW_S` they are like any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import trio

QUEUE_BYTES: Final = 64 << 20  # of requests that one run may leave waiting
ASK_AGAIN_S: Final = 5.0  # a full queue tells those that it refuses
TELL_EVERY_S: Final = 10.0
LOW_S: Final = 30.0


@dataclass(slots=True)
class Bell:
    """Wakes those who wait for it to ring."""

    _event: trio.Event = field(default_factory=trio.Event)

    def ring(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def rung(self, deadline: float) -> bool:
        """Wait for the next ring; False when the deadline (trio clock) passed first."""
        with trio.move_on_at(deadline) as scope:
            await self._event.wait()
        return not scope.cancelled_caught


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A rollout that waits for a replica. `called` says that it has yet to look again."""

    model: str
    bytes: int = 0  # of its request
    is_behind: bool = False  # others came first, so it has not looked for a place yet
    is_low: bool = False  # others go first, whenever they come
    called: bool = False
    _bell: Bell = field(default_factory=Bell)

    def call(self) -> None:
        self.called = True
        self._bell.ring()

    async def wait(self, deadline: float) -> None:
        """Until it is called, or the deadline (trio clock)."""
        if not self.called:
            await self._bell.rung(deadline)


@dataclass(slots=True, kw_only=True)
class Holding:
    """Rollouts that wait because nobody can take them, and for how long some did so far.

    A place that became free calls one of them, the first that can use it: had all to look, each
    answer would cost as much as there are rollouts that wait.
    """

    held: dict[Held, None] = field(default_factory=dict)  # in the order in which they came
    held_s: float = 0.0
    since: float = 0.0
    refused: int = 0  # so far, because the queue was full
    _told_at: float = -TELL_EVERY_S
    _turns: deque[Held] = field(default_factory=deque)  # those of the round that have yet to look
    _turn: Held | None = None  # who is to look now
    _behind: int = 0
    _bytes: int = 0
    _models: Counter[str] = field(default_factory=Counter)  # that those who wait name
    _low: Counter[str] = field(default_factory=Counter)  # the same of low priority

    @property
    def waiting(self) -> int:
        return len(self.held)

    def is_full(self, limit: int, more_bytes: int) -> bool:
        """Whether there is no room for a request of so many bytes. `limit` is of requests."""
        return len(self.held) >= limit or self._bytes + more_bytes > QUEUE_BYTES

    def is_awaited(self, model: str, *, is_low: bool = False) -> bool:
        """Whether others wait for that adapter, who come first."""
        return self._models[model] > 0 or (is_low and self._low[model] > 0)

    def enter(self, held: Held, now: float) -> None:
        if not self.held:
            self.since = now
        self.held[held] = None
        self._count(held)[held.model] += 1
        self._bytes += held.bytes
        self._behind += held.is_behind

    def leave(self, held: Held, now: float) -> None:
        self.looks(held)
        del self.held[held]
        self._bytes -= held.bytes
        self._forget(held)
        if not self.held:
            self.held_s += now - self.since
        self.looked(held)

    def promote(self, held: Held) -> None:
        """It has waited long enough behind others: it is like any other, and came before many."""
        if held.is_low:
            self._forget(held)
            held.is_low = False
            self._count(held)[held.model] += 1

    def _count(self, held: Held) -> Counter[str]:
        return self._low if held.is_low else self._models

    def _forget(self, held: Held) -> None:
        count = self._count(held)
        count[held.model] -= 1
        if not count[held.model]:
            del count[held.model]

    def _in_order(self) -> Iterator[Held]:
        if not self._low:
            yield from self.held
            return
        for is_low in (False, True):
            yield from (held for held in self.held if held.is_low is is_low)

    def looks(self, held: Held) -> None:
        """It is its turn."""
        self._behind -= held.is_behind
        held.is_behind = held.called = False

    def looked(self, held: Held) -> None:
        """Whether it found a place or not: it is the next one's turn."""
        if held is self._turn:
            self._begin_turn()

    def placed(self, model: str) -> None:
        """One that waited got a place; another may have been free when others came after it."""
        if self._behind:
            self.call_one(lambda other: other == model)

    def refuse(self, now: float) -> bool:
        """Count one that finds no room. Whether that is worth a word in the log now."""
        self.refused += 1
        if now - self._told_at < TELL_EVERY_S:
            return False
        self._told_at = now
        return True

    def call_one(self, usable: Callable[[str], bool]) -> None:
        """The first that has not been called and names a model that is `usable`."""
        for held in self._in_order():
            if not held.called and usable(held.model):
                held.call()
                return

    def call_all(self) -> None:
        """One after the other, in the order in which they came: tasks that are woken together run
        in any order."""
        self._turns = deque(self._in_order())
        if self._turn is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn = None
        while self._turns:
            held = self._turns.popleft()
            if held in self.held:
                self._turn = held
                held.call()
                return

    def total_s(self, now: float) -> float:
        return self.held_s + (now - self.since if self.held else 0.0)
