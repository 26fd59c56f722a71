"""Which replica gets a rollout.

Candidates hold the named adapter and have room. Affinity first: the replica that was given the
longest identifying prefix of this prompt, so that a group of rollouts shares one prefill; it is
remembered when the first of the group is placed, not when it is answered. Affinity is bounded by
work: a holder that is much further from done than the best candidate is passed over ("spill"), and
the one that gets the rollout instead holds the prompt from then on.

A replica's work is the tokens in flight there over its measured speed, which is the time until it
is done; equal times mean that nobody waits for a straggler. The first rollout of a group is placed
as if the whole group came with it: a slow replica that is idle gets no group that a fast one would
finish sooner. Replicas that carry more than they have been seen to carry come after the others, so
that a newcomer is filled step by step and not with all that arrives.

Pure and deterministic; ties go to the replica whose last group is longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from asyncgrpo_agent.core.prefixes import MAX_BYTES, PrefixMap

SPILL_FACTOR: Final = 1.5  # the holder's work may be so much more than the least ...
SPILL_ROLLOUTS: Final = 16  # ... plus this many like the one that is placed: a whole group
MAX_GROUP: Final = 64
_FIRST_SHARE: Final = 1 / 8  # of rollouts that are the first of their group, until it is known
_SHARE_WEIGHT: Final = 0.01  # of the newest rollout in the running mean of that share

Why = Literal["affinity", "least loaded", "spill", "probe"]


class Candidate(Protocol):
    """A replica that may get this rollout."""

    @property
    def name(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def in_flight_tokens(self) -> int: ...
    @property
    def speed(self) -> float: ...  # tokens a second, or relative to the other candidates'
    @property
    def proven(self) -> int: ...  # rollouts that it may carry at once before the others do


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    why: Why


class PrefixRouter:
    """Remembers who was given which prefix."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.prefixes = PrefixMap(max_bytes)
        self._first_share = _FIRST_SHARE
        self._groups = 0  # placed so far
        self._last_group: dict[str, int] = {}  # by replica

    @property
    def group_size(self) -> float:
        """Rollouts that share a prompt, as seen lately."""
        return min(1 / self._first_share, MAX_GROUP)

    def choose(
        self,
        candidates: Sequence[AnyCandidate],
        *,
        version: str = "",
        blocks: Sequence[int] = (),
        tokens: int = 1,
    ) -> Choice:
        """One of `candidates` (one at least) for a rollout of `tokens`.

        `blocks`: chained hashes, shortest prefix first; none if the prompt is text.
        """
        named = {candidate.name: candidate for candidate in candidates}
        name = self.prefixes.holder(version, blocks, named, len(named))
        if name is None:
            least = self._least(candidates, tokens * self.group_size if blocks else tokens)
            choice = Choice(replica=least.name, why="least loaded")
        else:
            choice = self._bounded(named[name], candidates, tokens)
        self._note(choice, version, blocks)
        return choice

    def retire(self, version: str) -> None:
        """Nobody asks for the version any more."""
        self.prefixes.retire(version)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        self.prefixes.forget(replica)
        self._last_group.pop(replica, None)

    def _bounded(self, holder: Candidate, candidates: Sequence[Candidate], tokens: int) -> Choice:
        ready_s = [(c.in_flight_tokens + tokens) / c.speed for c in candidates]
        limit_s = min(ready_s) * SPILL_FACTOR + SPILL_ROLLOUTS * tokens / holder.speed
        if (holder.in_flight_tokens + tokens) / holder.speed <= limit_s:
            return Choice(replica=holder.name, why="affinity")
        return Choice(replica=self._least(candidates, tokens).name, why="spill")

    def _least(self, candidates: Sequence[AnyCandidate], tokens: float) -> AnyCandidate:
        """The one that would be done first if it got `tokens` more."""
        last = self._last_group

        def key(candidate: AnyCandidate) -> tuple[bool, float, int, str]:
            name = candidate.name
            return (
                candidate.in_flight >= candidate.proven,
                (candidate.in_flight_tokens + tokens) / candidate.speed,
                last.get(name, 0),
                name,
            )

        return min(candidates, key=key)

    def _note(self, choice: Choice, version: str, blocks: Sequence[int]) -> None:
        first = choice.why == "least loaded"
        if first:
            self._groups += 1
            self._last_group[choice.replica] = self._groups
        if blocks:
            self._first_share += _SHARE_WEIGHT * (first - self._first_share)
            self.prefixes.remember(version, blocks, choice.replica)
