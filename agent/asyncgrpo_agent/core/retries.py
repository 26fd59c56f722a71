"""How many rollouts may be sent again because a replica answered with an error.

Retries are a share of the requests, plus a trickle and a burst, so that a fleet that fails
everything does not get twice the load on top. A retry that is beyond the budget waits; it is not
refused, for TRL dies of a failed rollout. A rollout whose replica is gone is sent again at once and
costs nothing: that replica's load is gone too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.2  # retries a request earns
TRICKLE_PER_S: Final = 1.0
BURST: Final = 32.0


@dataclass(slots=True)
class RetryBudget:
    """Counts of one run. Retries started by `now` are at most
    BURST + SHARE * requests + TRICKLE_PER_S * now."""

    requests: int = 0
    retried: int = 0
    duplicates: int = 0  # of the retried, those that may have run before
    delayed: int = 0  # of the retried, those that waited for the budget
    _left: float = BURST
    _at: float = 0.0

    def request(self) -> None:
        """A rollout came for the first time."""
        self.requests += 1
        self._left = min(BURST, self._left + SHARE)

    def retry(self, now: float, *, answered: bool, may_have_run: bool) -> float:
        """Seconds to wait before a rollout is sent again. `answered`: with an error."""
        self.retried += 1
        self.duplicates += may_have_run
        if not answered:
            return 0.0
        self._left = min(BURST, self._left + TRICKLE_PER_S * (now - self._at)) - 1
        self._at = now
        if self._left >= 0:
            return 0.0
        self.delayed += 1
        return -self._left / TRICKLE_PER_S
