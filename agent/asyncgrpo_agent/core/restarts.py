"""Whether a trainer that failed is started again within the same process, and why not.

Each start goes on at the newest checkpoint, so a failure that came after new steps cost only those
since. What fails before its first step has something wrong with it, and what fails again and again
at the same step would do so for ever: steps beyond the furthest one are what counts as progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One start: the step that it went on from, and the last step that it trained."""

    began_at: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    reason: str
    has_progressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    reason: str


def next_start(failures: Sequence[Failure], allowed: int) -> Again | Stop:
    """After the last of `failures` (oldest first, at least one).

    `allowed` starts in a row may pass without progress; 0 allows no start at all.
    """
    if not allowed:
        return Stop(reason="trainer.restarts is 0")
    if all(failure.step <= failure.began_at for failure in failures):
        return Stop(reason="it failed before its first step")
    furthest, in_vain = -1, 0
    for failure in failures:
        has_progressed = failure.step > max(furthest, failure.began_at)
        in_vain = 0 if has_progressed else in_vain + 1
        furthest = max(furthest, failure.step)
    if in_vain >= allowed:
        return Stop(reason=f"{in_vain} starts in a row did not get beyond step {furthest}")
    return Again(
        reason=f"it had come to step {failures[-1].step}, the furthest was {furthest}",
        has_progressed=not in_vain,
    )
