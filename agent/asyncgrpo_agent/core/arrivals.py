"""What a replica remembers of adapters on their way in: phases, failures, refusals.

An adapter that could not be brought in is put off, for longer each time, and others go on; a
commit that can never be loaded is refused for good. Pure: `now` is passed in (monotonic seconds),
and `keep` bounds what is remembered, whatever the length of a run.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final

RETRY_S: Final = 1.0  # twice as long after each failure, up to
MAX_RETRY_S: Final = 30.0
KEPT_REFUSALS: Final = 1024  # as many commits as one listing shows
_FIRST_PHASE: Final = "not visible in the bucket"
_PHASES: Final = (("staged", "not loaded by vLLM"), ("visible", "not copied and verified"))


@dataclass(frozen=True, slots=True)
class Retry:
    """An adapter that could not be brought in: when to try again, and what was said of it."""

    at: float
    delay_s: float
    reason: str


@dataclass(slots=True)
class Arrivals:
    """Adapters by physical name, commits by key."""

    refused: dict[str, str] = field(default_factory=dict)  # key -> why it is never tried again
    _retries: dict[str, Retry] = field(default_factory=dict)
    _noticed_at: dict[str, float] = field(default_factory=dict)
    _since_s: dict[str, dict[str, float]] = field(default_factory=dict)  # phase -> since noticed

    # --- phases ---------------------------------------------------------------------------

    def notice(self, name: str, now: float) -> None:
        """It was announced, or its commit was seen; the first time counts."""
        self._noticed_at.setdefault(name, now)

    def reach(self, phase: str, name: str, now: float) -> None:
        """How long after it was noticed an adapter came to this phase."""
        noticed_at = self._noticed_at.get(name)
        if noticed_at is not None:
            self._since_s.setdefault(name, {})[phase] = now - noticed_at

    def arrive(self, name: str, began: float) -> tuple[float, dict[str, float]]:
        """When it was noticed, or `began`, and its phases; forgets both, and its failures."""
        self._retries.pop(name, None)
        return self._noticed_at.pop(name, began), self._since_s.pop(name, {})

    def standing(self, name: str, now: float) -> str:
        """How far one has come that is awaited, in words; empty if nobody has heard of it."""
        noticed_at = self._noticed_at.get(name)
        if noticed_at is None:
            return ""
        reached = self._since_s.get(name, {})
        phase = next((words for key, words in _PHASES if key in reached), _FIRST_PHASE)
        retry = self._retries.get(name)
        failure = f"; it failed: {retry.reason}" if retry is not None else ""
        return f"{phase} {now - noticed_at:.0f} s after it was announced{failure}"

    # --- failures -------------------------------------------------------------------------

    def put_off(self, name: str, reason: str, now: float) -> bool:
        """Try it again later. Whether this is the first failure, or another than the last."""
        known = self._retries.get(name)
        delay_s = min(2 * known.delay_s, MAX_RETRY_S) if known else RETRY_S
        self._retries[name] = Retry(now + delay_s, delay_s, reason)
        return known is None or known.reason != reason

    def has_failed(self, name: str) -> bool:
        return name in self._retries

    def is_hopeful(self, name: str) -> bool:
        """Whether it has not failed for long yet."""
        retry = self._retries.get(name)
        return retry is None or retry.delay_s < MAX_RETRY_S

    def is_due(self, name: str, key: str, now: float) -> bool:
        retry = self._retries.get(name)
        return key not in self.refused and (retry is None or now >= retry.at)

    def due_s(self, now: float) -> list[float]:
        """After how long those that were put off are due."""
        return [retry.at - now for retry in self._retries.values() if retry.at > now]

    def try_again(self) -> None:
        """There is another attempt or another vLLM, and earlier failures say nothing about it."""
        self._retries.clear()

    def keep(self, names: Set[str]) -> None:
        """Forget all other adapters, and the oldest of many refusals."""
        for by_name in (self._retries, self._noticed_at, self._since_s):
            for name in by_name.keys() - names:
                del by_name[name]
        for key in list(self.refused)[:-KEPT_REFUSALS]:
            del self.refused[key]
