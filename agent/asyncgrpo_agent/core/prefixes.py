"""Who was given which prefix of a prompt, for each version.

A prompt is the list of its blocks' chained hashes (see `prompts`), so the hash of a block stands
for the whole prefix that ends with it. Every block is kept with the replica that got it first; the
last block of a prompt is its end, and belongs to the replica that got the prompt last. A lookup
goes from the longest prefix to shorter ones, and the first known block decides:

- An end identifies: an equal prompt is of the same group, a longer one is a later turn of it.
- A block in the middle does so only if few prompts part ways there. What many prompts begin with (a
  system prompt) is cached everywhere soon, and following it would send everybody to one replica.

Memory is bounded in bytes. Entries are dropped in bulk, never one by one: a version's when it is
retired, the least recently used version's when there are too many, and the older half of a single
version that is larger than all the rest. A replica's entries are listed, so forgetting it takes
time in proportion to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_BYTES: Final = 64 << 20
# An entry: the hash (an int of its own), its place in a dict that may have just doubled, and in its
# replica's list. Measured by a test.
ENTRY_BYTES: Final = 128
_VERSION_ENTRIES: Final = 16  # what an empty version weighs, in entries
MAX_BRANCHES: Final = 64  # continuations of one prompt: a group's rollouts take their next turns


@dataclass(slots=True)
class _Part:
    """Blocks that were used in the same stretch of time, and are dropped together."""

    holders: dict[int, str] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)  # a replica's keys of `holders`
    ends: set[int] = field(default_factory=set)
    forks: dict[int, int] = field(default_factory=dict)  # prompts that left the known path here
    entries: int = 0

    def give(self, block: int, replica: str) -> None:
        if self.holders.get(block) != replica:
            self.holders[block] = replica
            self.given.setdefault(replica, []).append(block)
            self.entries += 1

    def end(self, block: int) -> None:
        if block not in self.ends:
            self.ends.add(block)
            self.entries += 1

    def fork(self, block: int) -> None:
        known = self.forks.get(block, 0)
        self.forks[block] = known + 1
        self.entries += not known

    def forget(self, replica: str) -> None:
        blocks = self.given.pop(replica, [])
        self.entries -= len(blocks)
        for block in blocks:
            if self.holders.get(block) == replica:
                del self.holders[block]


@dataclass(slots=True)
class _Version:
    """`old` is read only: what is still used moves to `new`."""

    new: _Part = field(default_factory=_Part)
    old: _Part = field(default_factory=_Part)

    @property
    def entries(self) -> int:
        return _VERSION_ENTRIES + self.new.entries + self.old.entries

    def rotate(self) -> None:
        self.old, self.new = self.new, _Part()

    def deepest(self, blocks: Sequence[int]) -> int:
        """The index of the last known block, or -1."""
        new, old = self.new.holders, self.old.holders
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index] in new or blocks[index] in old:
                return index
        return -1

    def identifies(self, block: int, fleet_size: int) -> bool:
        """Whether few enough prompts part ways at `block`: half a replica's fair share of all.

        A version's first prompts can be compared with nothing: then only ends identify.
        """
        part_here = 1 + self.new.forks.get(block, 0) + self.old.forks.get(block, 0)
        if part_here <= MAX_BRANCHES and (block in self.new.ends or block in self.old.ends):
            return True
        return part_here * 2 * fleet_size <= len(self.new.ends) + len(self.old.ends)

    def holder(self, blocks: Sequence[int], fleet: Container[str], fleet_size: int) -> str | None:
        for index in range(self.deepest(blocks), -1, -1):
            block = blocks[index]
            holder = self.new.holders.get(block) or self.old.holders.get(block)
            if holder is None:
                continue
            if not self.identifies(block, fleet_size):
                return None  # nor does a shorter prefix, which more prompts share
            if holder in fleet:
                return holder
        return None

    def remember(self, blocks: Sequence[int], replica: str) -> None:
        new, end = self.new, blocks[-1]
        if new.holders.get(end) == replica and end in new.ends:
            return
        deepest = self.deepest(blocks)
        if 0 <= deepest < len(blocks) - 1:
            new.fork(blocks[deepest])
        for block in blocks:
            if block not in new.holders:
                new.give(block, self.old.holders.get(block, replica))
        new.give(end, replica)
        new.end(end)


class PrefixMap:
    """Prefixes and their holders by version, in at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max(2, max_bytes // ENTRY_BYTES)
        self._versions: OrderedDict[str, _Version] = OrderedDict()  # least recently used first
        self._entries = 0  # of all versions

    @property
    def used_bytes(self) -> int:
        return self._entries * ENTRY_BYTES

    def holder(
        self, version: str, blocks: Sequence[int], fleet: Container[str], fleet_size: int
    ) -> str | None:
        """The replica in `fleet` that has the longest identifying prefix, or None."""
        known = self._versions.get(version)
        return known.holder(blocks, fleet, fleet_size) if known and blocks else None

    def remember(self, version: str, blocks: Sequence[int], replica: str) -> None:
        """`replica` gets the prompt."""
        if not blocks:
            return
        known = self._versions.get(version)
        before = known.entries if known else 0
        if known is None:
            known = self._versions[version] = _Version()
        self._versions.move_to_end(version)
        known.remember(blocks, replica)
        if known.new.entries > self._max_entries // 2:
            known.rotate()
        self._entries += known.entries - before
        while self._entries > self._max_entries and len(self._versions) > 1:
            self._entries -= self._versions.popitem(last=False)[1].entries

    def retire(self, version: str) -> None:
        """Nobody asks for the version any more."""
        known = self._versions.pop(version, None)
        self._entries -= known.entries if known else 0

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        for version in self._versions.values():
            version.new.forget(replica)
            version.old.forget(replica)
        self._entries = sum(version.entries for version in self._versions.values())
