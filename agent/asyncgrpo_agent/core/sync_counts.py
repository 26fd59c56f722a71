"""The syncs that one proxy has seen end, as counters: how many, in which way, in what time.

`sync_rows` keeps the newest of them with all their parts; these only ever grow.

Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from asyncgrpo_agent.core.metric_model import Histogram

OUTCOMES: Final = ("reached", "timed_out")
BOUNDS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
KNOWN_NAMES: Final = 64  # adapters; a live window has fewer


@dataclass(slots=True)
class SyncCounts:
    """Of one run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    quorum_s: Histogram = field(default_factory=lambda: Histogram(BOUNDS_S))
    last_s: float | None = None
    refusals: int = 0  # of an adapter by a replica
    _counted: deque[str] = field(default_factory=lambda: deque(maxlen=KNOWN_NAMES))

    def ended(self, adapter: str, *, quorum_s: float, timed_out: bool) -> None:
        """Told again of the live adapters, as after a trainer's reconnect, it counts none twice."""
        if adapter in self._counted:
            return
        self._counted.append(adapter)
        self.outcomes["timed_out" if timed_out else "reached"] += 1
        self.quorum_s.observe(quorum_s)
        self.last_s = quorum_s
