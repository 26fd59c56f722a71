"""The metrics of a run over its steps, in bounded memory however long the run becomes.

Each metric keeps mean, least and greatest value of bins of equal step count. When a step lies
beyond the last bin, neighbours are merged and each bin counts twice as many steps; the names share
the bins. A step that comes again, after a resume, replaces what came after it before.

Pure. Measured: 60 metrics over 10,000 steps take under 2 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

BINS: Final = 1024
MAX_NAMES: Final = 128
_NOTHING: Final = math.nan

Points = list[float | None]


class _Bins:
    """One metric. A bin that holds nothing has a count of 0."""

    __slots__ = ("counts", "greatest", "least", "sums")

    def __init__(self) -> None:
        self.sums = array("d", bytes(8 * BINS))
        self.counts = array("L", bytes(array("L").itemsize * BINS))
        self.least = array("f", [_NOTHING]) * BINS
        self.greatest = array("f", [_NOTHING]) * BINS

    def add(self, at: int, value: float) -> None:
        if self.counts[at]:
            self.least[at] = min(self.least[at], value)
            self.greatest[at] = max(self.greatest[at], value)
        else:
            self.least[at] = self.greatest[at] = value
        self.sums[at] += value
        self.counts[at] += 1

    def halve(self) -> None:
        for at in range(BINS // 2):
            self._merge(2 * at, at)
        for at in range(BINS // 2, BINS):
            self.clear(at)

    def _merge(self, first: int, target: int) -> None:
        second = first + 1
        if not self.counts[first] or not self.counts[second]:
            one = first if self.counts[first] else second
            least, greatest = self.least[one], self.greatest[one]
        else:
            least = min(self.least[first], self.least[second])
            greatest = max(self.greatest[first], self.greatest[second])
        sums = self.sums[first] + self.sums[second]
        counts = self.counts[first] + self.counts[second]
        self.sums[target], self.counts[target] = sums, counts
        self.least[target], self.greatest[target] = least, greatest

    def clear(self, at: int) -> None:
        self.sums[at], self.counts[at] = 0.0, 0
        self.least[at] = self.greatest[at] = _NOTHING


@dataclass(frozen=True, slots=True)
class Series:
    """Some metrics as a chart shows them; all lists are as long as `step`, the first of each bin.

    None where a bin holds nothing. `unix_s` is when the last step of a bin was logged.
    """

    step: list[int]
    unix_s: Points
    series: dict[str, dict[str, Points]]
    steps_a_point: int

    @property
    def down_sampled(self) -> bool:
        return self.steps_a_point > 1


@dataclass(slots=True)
class SeriesStore:
    """All metrics of one run. Names beyond MAX_NAMES are left out."""

    stride: int = 1  # steps a bin
    last_step: int = -1
    left_out: int = 0  # values of names that found no room
    _bins: dict[str, _Bins] = field(default_factory=dict)
    _unix_s: array[float] = field(default_factory=lambda: array("d", bytes(8 * BINS)))

    @property
    def names(self) -> list[str]:
        return sorted(self._bins)

    @property
    def size_bytes(self) -> int:
        one = next(iter(self._bins.values()), None)
        if one is None:
            return 0
        arrays = (one.sums, one.counts, one.least, one.greatest)
        return len(self._bins) * sum(a.itemsize * BINS for a in arrays) + 8 * BINS

    def add(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """The metrics of a step. Of several about one step all count."""
        if step < 0:
            return
        while step // self.stride >= BINS:
            self._halve()
        at = step // self.stride
        self._unix_s[at] = unix_s
        self.last_step = max(self.last_step, step)
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            bins = self._bins.get(name)
            if bins is None:
                if len(self._bins) >= MAX_NAMES:
                    self.left_out += 1
                    continue
                bins = self._bins[name] = _Bins()
            bins.add(at, value)

    def cut(self, step: int) -> None:
        """Training goes on behind `step`: what was logged later does not count any more."""
        if step >= self.last_step:
            return
        for at in range(-(-(step + 1) // self.stride), BINS):
            self._unix_s[at] = 0.0
            for bins in self._bins.values():
                bins.clear(at)
        self.last_step = step

    def read(self, names: Iterable[str], points: int) -> Series:
        """At most `points` bins, one at least, of those names that are known."""
        used = self.last_step // self.stride + 1
        merged = max(1, -(-used // max(1, points)))
        starts = range(0, used, merged)
        unix_s: Points = [self._last_unix_s(at, min(at + merged, used)) for at in starts]
        known = [name for name in dict.fromkeys(names) if name in self._bins]
        return Series(
            step=[at * self.stride for at in starts],
            unix_s=unix_s,
            series={name: _read(self._bins[name], starts, merged, used) for name in known},
            steps_a_point=self.stride * merged,
        )

    def _last_unix_s(self, first: int, end: int) -> float | None:
        return max(self._unix_s[first:end]) or None

    def _halve(self) -> None:
        for bins in self._bins.values():
            bins.halve()
        for at in range(BINS // 2):
            self._unix_s[at] = max(self._unix_s[2 * at], self._unix_s[2 * at + 1])
        for at in range(BINS // 2, BINS):
            self._unix_s[at] = 0.0
        self.stride *= 2


def _read(bins: _Bins, starts: Sequence[int], merged: int, used: int) -> dict[str, Points]:
    means: Points = []
    least: Points = []
    greatest: Points = []
    for first in starts:
        part = slice(first, min(first + merged, used))
        count = sum(bins.counts[part])
        if not count:
            for points in (means, least, greatest):
                points.append(None)
            continue
        means.append(_short(sum(bins.sums[part]) / count))
        least.append(_short(min(_filled(bins.least[part]))))
        greatest.append(_short(max(_filled(bins.greatest[part]))))
    return {"mean": means, "min": least, "max": greatest}


def _filled(values: array[float]) -> list[float]:
    return [value for value in values if value == value]  # an empty bin has NaN, which does not


def _short(value: float) -> float:
    """Six digits, which is more than a chart shows and what single precision has."""
    return float(f"{value:.6g}")
