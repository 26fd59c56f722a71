"""Virtual time: an event queue, and processes that are generators. No clock, no IO.

A process yields how many seconds to wait, or `Until` a signal fires or a moment comes. What happens
at the same moment happens in the order in which it was asked for, so a run depends on its inputs
alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter:
    """A process that waits for a signal or a moment; the first of them counts."""

    process: Process
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Signal:
    """Wakes those who wait for it now; one who comes later waits for the next."""

    waiters: list[_Waiter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Until:
    """Wait for the signal, but not beyond the moment."""

    signal: Signal
    at_s: float


Steps = Generator[float | Until, None, T]
Process = Steps[None]


class Timeline:
    """`now` is in seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(at_s, self.now), self._serial, event))

    def start(self, process: Process) -> None:
        """Runs until its first wait at once. One that was closed meanwhile goes no further."""
        wish = next(process, None)
        if isinstance(wish, Until):
            waiter = _Waiter(process)
            wish.signal.waiters.append(waiter)
            self.at(wish.at_s, lambda: self._resume(waiter))
        elif wish is not None:
            self.at(self.now + wish, lambda: self.start(process))

    def fire(self, signal: Signal) -> None:
        waiters, signal.waiters = signal.waiters, []
        for waiter in waiters:
            self._resume(waiter)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until_s

    def _resume(self, waiter: _Waiter) -> None:
        if not waiter.is_over:
            waiter.is_over = True
            self.start(waiter.process)
