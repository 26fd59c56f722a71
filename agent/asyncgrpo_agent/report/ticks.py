"""Where the ticks of an axis are, and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_NICE: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_MARGIN: Final = 1e-9
_LARGE: Final = 10_000.0
_SMALL: Final = 1e-3
_SUFFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Ticks:
    """An axis from `low` to `high`, both of them ticks unless they were fixed."""

    low: float
    high: float
    values: tuple[float, ...]
    labels: tuple[str, ...]


def ticks(
    low: float, high: float, count: int, *, is_whole: bool = False, is_fixed: bool = False
) -> Ticks:
    """About `count` ticks over all from `low` to `high`; `is_fixed`: and not a bit beyond.

    With `is_whole` all of them are whole numbers.
    """
    if not high > low:
        pad = abs(high) * 0.1 or 1.0
        low, high = (low, low + 1.0) if is_whole or low == 0 else (low - pad, high + pad)
    step = _step((high - low) / max(1, count))
    if is_whole:
        step = max(1.0, float(math.ceil(step - _MARGIN)))
    if is_fixed:
        first, last = math.ceil(low / step - _MARGIN), math.floor(high / step + _MARGIN)
    else:
        first, last = math.floor(low / step + _MARGIN), math.ceil(high / step - _MARGIN)
        low, high = first * step, last * step
    values = tuple(at * step for at in range(first, last + 1))
    return Ticks(low, high, values, labels_of(values, step))


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in _NICE if nice * power >= rough * (1 - _MARGIN))


def labels_of(values: tuple[float, ...], step: float) -> tuple[str, ...]:
    """All of one axis in one notation."""
    greatest = max(map(abs, values), default=0.0)
    if greatest == 0:
        return tuple("0" for _ in values)
    if greatest >= _LARGE:
        divisor, suffix = next((d, s) for d, s in _SUFFIXES if greatest >= d)
        decimals = _decimals(step / divisor)
        return tuple(f"{v / divisor:.{decimals}f}{suffix}" if v else "0" for v in values)
    if greatest < _SMALL:
        power = math.floor(math.log10(greatest))
        decimals = _decimals(step / 10.0**power)
        return tuple(f"{v / 10.0**power:.{decimals}f}e{power}" if v else "0" for v in values)
    return tuple(f"{v:.{_decimals(step)}f}" for v in values)


def _decimals(step: float) -> int:
    """As many as tell neighbours apart."""
    return next((n for n in range(9) if abs(step * 10**n - round(step * 10**n)) < 1e-6 * 10**n), 9)


def short(value: float) -> str:
    """Three digits, for a sentence or a table."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= _LARGE:
        divisor, suffix = next((d, s) for d, s in _SUFFIXES if abs(value) >= d)
        return f"{value / divisor:.3g}{suffix}"
    if abs(value) < _SMALL:
        text, _, power = f"{value:.2e}".partition("e")
        return f"{text.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
