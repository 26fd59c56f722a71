"""What the replicas of a run have cost so far: hours of being registered, and money where known.

Pure; whoever keeps the time says how many seconds have passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600.0


@dataclass(slots=True)
class Usage:
    """Of one run, over all of its replicas and attempts."""

    replica_s: float = 0.0
    priced_s: float = 0.0  # the part of it whose price is known
    cost: float = 0.0  # of that part, in whatever currency the prices are in

    @property
    def replica_hours(self) -> float:
        return self.replica_s / HOUR_S

    @property
    def unpriced_hours(self) -> float:
        return (self.replica_s - self.priced_s) / HOUR_S

    def charge(self, seconds: float, price_per_hour: float) -> None:
        """One replica was there for so long; a price of 0 is not known."""
        self.replica_s += seconds
        if price_per_hour > 0:
            self.priced_s += seconds
            self.cost += seconds * price_per_hour / HOUR_S
