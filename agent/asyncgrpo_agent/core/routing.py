"""Which replica gets a rollout.

Candidates hold the named adapter and have room. Affinity first: the replica that was last given
the longest identifying prefix of this prompt, so that a group of rollouts shares one prefill.
Blocks that many prompts share (a system prompt) identify nothing. Affinity is bounded by load: a
holder that is far busier than the least loaded candidate is passed over ("spill").

Pure and bounded: the map of prefixes keeps at most `MAX_BLOCKS` entries, least recently used go.
Block hashes are chained and seeded with the adapter's name, so a version's entries match no other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

MAX_BLOCKS: Final = 200_000
SHARED_AFTER: Final = 4  # a block followed by so many different blocks is shared, not identifying
SPILL_FACTOR: Final = 1.5  # the holder may carry so much more than the least loaded ...
SPILL_SLACK_TOKENS: Final = 8192  # ... plus this, so that a group stays together on an idle fleet

Why = Literal["affinity", "least loaded", "spill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may get this rollout. `speed` weighs its load (tokens a second, relative)."""

    name: str
    in_flight_tokens: int
    speed: float = 1.0

    @property
    def load(self) -> float:
        return self.in_flight_tokens / self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    replica: str
    why: Why


class _Block:
    __slots__ = ("holder", "next_blocks")

    def __init__(self) -> None:
        self.holder = ""
        self.next_blocks: set[int] = set()


class PrefixRouter:
    """Remembers who was given which prefix."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def choose(self, candidates: Sequence[Candidate], blocks: Sequence[int]) -> Choice:
        """One of `candidates` (one at least); `blocks`: chained hashes, shortest prefix first."""
        least = min(candidates, key=lambda c: (c.load, c.name))
        holder = self._holder(blocks, {c.name: c for c in candidates})
        choice = _bounded(holder, least)
        self._remember(blocks, choice.replica)
        return choice

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        for block in [b for b, entry in self._blocks.items() if entry.holder == replica]:
            del self._blocks[block]

    def _holder(self, blocks: Sequence[int], candidates: dict[str, Candidate]) -> Candidate | None:
        for block in reversed(blocks):
            entry = self._blocks.get(block)
            if entry is None:
                continue
            if len(entry.next_blocks) >= SHARED_AFTER:
                return None  # all shorter prefixes are shared by at least as many prompts
            if entry.holder in candidates:
                return candidates[entry.holder]
        return None

    def _remember(self, blocks: Sequence[int], replica: str) -> None:
        previous: _Block | None = None
        for block in blocks:
            entry = self._blocks.get(block)
            if entry is None:
                entry = self._blocks[block] = _Block()
            else:
                self._blocks.move_to_end(block)
            entry.holder = replica
            if previous is not None and len(previous.next_blocks) < SHARED_AFTER:
                previous.next_blocks.add(block)
            previous = entry
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def _bounded(holder: Candidate | None, least: Candidate) -> Choice:
    if holder is None:
        return Choice(replica=least.name, why="least loaded")
    limit = least.load * SPILL_FACTOR + SPILL_SLACK_TOKENS / max(least.speed, holder.speed)
    if holder.load <= limit:
        return Choice(replica=holder.name, why="affinity")
    return Choice(replica=least.name, why="spill")
