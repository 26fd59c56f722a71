"""What a metric is: a family with its kind and labels, and one sample of it.

Names follow Prometheus' conventions: base units in the name, counters that only grow until their
process starts again, few values of each label. No label is a peer's address or an adapter's name,
of which there is no end.

Pure; `roles.exposition` turns samples into text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal

PREFIX: Final = "asyncgrpo_"
FamilyKind = Literal["gauge", "counter", "info", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """`name` is without the prefix, and without the suffix that a kind adds: _total, _info."""

    name: str
    kind: FamilyKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound, as many however long it is kept."""

    bounds: tuple[float, ...]
    total: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound, as a label has it, and how many were at most that; the last is all."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one family. The value of an info is 1, what it says is in its labels."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


def one(family: Family, labels: tuple[str, ...], value: float | None) -> Iterator[Sample]:
    """No sample for what is not known."""
    if value is not None and not math.isnan(value):
        yield Sample(family, labels, float(value))


def one_of(
    family: Family, labels: tuple[str, ...], states: Iterable[str], now: str
) -> Iterator[Sample]:
    """A set of states, the last label: 1 for the one that holds, 0 for all others."""
    for state in states:
        yield Sample(family, (*labels, state), float(state == now))
