"""Horizontal bars with their values, in the shapes of a report's charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncgrpo_agent.report.charts import (
    LABEL_SIZE,
    TICK_SIZE,
    TITLE_SIZE,
    WIDTH,
    Drawing,
    Ink,
    Path,
    Shape,
    Text,
)

TOP, ROW, BAR = 46.0, 36.0, 9.0
LEFT, RIGHT = 14.0, 70.0


@dataclass(frozen=True, slots=True)
class Bars:
    """`rows` are names, values from 0 and inks; `mark` is a value to compare them with."""

    title: str
    rows: Sequence[tuple[str, float, Ink]]
    mark: float | None = None


def drawn(bars: Bars) -> Drawing:
    height = TOP + ROW * len(bars.rows) + 8
    most = max([value for _, value, _ in bars.rows] + [bars.mark or 0.0, 1e-9])
    shapes: list[Shape] = [Text((LEFT, 24.0), bars.title, TITLE_SIZE, bold=True)]
    for number, (name, value, ink) in enumerate(bars.rows):
        y = TOP + ROW * number
        shapes.append(Text((LEFT, y + LABEL_SIZE * 0.7), name, LABEL_SIZE))
        bar_y = y + LABEL_SIZE + 9
        end = _x(value, most)
        if value > 0:
            shapes.append(Path(((LEFT + BAR / 2, bar_y), (end, bar_y)), ink, BAR))
        beside = max(end, _x(bars.mark, most)) if bars.mark is not None else end
        at = (beside + BAR / 2 + 6, bar_y + TICK_SIZE * 0.36)
        shapes.append(Text(at, f"{value:,.3g}", TICK_SIZE, "muted"))
        if bars.mark is not None:
            x = _x(bars.mark, most)
            shapes.append(Path(((x, bar_y - BAR), (x, bar_y + BAR)), "axis", 1.6))
    return Drawing(WIDTH, height, tuple(shapes))


def _x(value: float, most: float) -> float:
    return max(LEFT + BAR / 2, LEFT + (WIDTH - LEFT - RIGHT) * value / most)
