"""A chart as plain shapes: one layout, drawn as SVG by one module and as PNG by another.

Lengths are in pixels of a drawing that is WIDTH wide. Colours and weights are named here and given
by those who draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Literal

from asyncgrpo_agent.report.ticks import Ticks, ticks

WIDTH: Final = 620.0
HEIGHT: Final = 330.0
TITLE_SIZE: Final = 15.0
LABEL_SIZE: Final = 12.5
TICK_SIZE: Final = 11.5
MANY: Final = 120  # points
MAX_RESUMES: Final = 12  # more are not marked, for nothing would be seen behind them
_TOP: Final = 58.0
_BOTTOM: Final = 48.0
_RIGHT: Final = 18.0  # without the labels of the guides
_LEFT: Final = 34.0  # without the labels of the ticks
_CHARACTER: Final = 0.55  # of the size of a font: the mean width of a digit or letter
_APART: Final = 13.0  # the least distance of two guides' labels
_GREATEST: Final = 1e100
_NEAR_ZERO: Final = 0.1  # of the greatest x: then the axis begins at 0

Ink = Literal["text", "muted", "grid", "axis", "guide", "bad", "soft", "c0", "c1", "c2", "c3"]
Anchor = Literal["start", "middle", "end"]
Style = Literal["line", "thin", "dots", "marked", "steps"]
Point = tuple[float, float]


# --- what is shown ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series; `soft` ink is for what stands behind its own mean. `band` holds x, and the least
    and the greatest value there."""

    label: str
    points: Sequence[Point]
    ink: Ink = "c0"
    style: Style = "line"
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A level that the values are compared with."""

    y: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`fixed_y` is an axis that the values may not move, `floor` a value that it has to hold."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    guides: Sequence[Guide] = ()
    fixed_y: tuple[float, float] | None = None
    floor: float | None = None
    resumes: Sequence[float] = ()
    whole_y: bool = False


# --- shapes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Path:
    points: tuple[Point, ...]
    ink: Ink
    width: float
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    points: tuple[Point, ...]
    ink: Ink


@dataclass(frozen=True, slots=True)
class Dot:
    at: Point
    ink: Ink
    radius: float


@dataclass(frozen=True, slots=True)
class Text:
    """`at` is where its base line begins, has its middle or ends; `turned` to be read from the
    right-hand side."""

    at: Point
    text: str
    size: float
    ink: Ink = "text"
    anchor: Anchor = "start"
    bold: bool = False
    turned: bool = False


Shape = Path | Area | Dot | Text


@dataclass(frozen=True, slots=True)
class Drawing:
    width: float
    height: float
    shapes: tuple[Shape, ...]


# --- layout ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the values are on the drawing."""

    left: float
    right: float
    top: float
    bottom: float
    x: Ticks
    y: Ticks

    def at_x(self, value: float) -> float:
        span = self.x.high - self.x.low
        return round(self.left + (value - self.x.low) / span * (self.right - self.left), 2)

    def at_y(self, value: float) -> float:
        inside = min(self.y.high, max(self.y.low, value))
        span = self.y.high - self.y.low
        return round(self.bottom - (inside - self.y.low) / span * (self.bottom - self.top), 2)

    def at(self, point: Point) -> Point:
        return self.at_x(point[0]), self.at_y(point[1])


@dataclass(slots=True)
class _Shapes:
    found: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.found.extend(shapes)


def draw(chart: Chart) -> Drawing:
    """The whole chart; one without a value has its axes and says so."""
    chart = replace(chart, lines=[_finite(line) for line in chart.lines])
    frame, shapes = _frame(chart), _Shapes()
    shapes.add(Text((8.0, 21.0), chart.title, TITLE_SIZE, bold=True))
    _axes(chart, frame, shapes)
    for at in chart.resumes[:MAX_RESUMES]:
        if frame.x.low < at < frame.x.high:
            x = frame.at_x(at)
            shapes.add(Path(((x, frame.top), (x, frame.bottom)), "guide", 1.0, dashed=True))
    for line in chart.lines:
        _line(line, frame, shapes)
    _guides(chart.guides, frame, shapes)
    _legend(chart, frame, shapes)
    if not any(line.points for line in chart.lines):
        middle = ((frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2)
        shapes.add(Text(middle, "nothing was logged", LABEL_SIZE, "muted", "middle"))
    return Drawing(WIDTH, HEIGHT, tuple(shapes.found))


def _finite(line: Line) -> Line:
    """Without what is on no axis, whoever logged it."""
    return replace(
        line,
        points=[point for point in line.points if _is_finite(*point)],
        band=[row for row in line.band if _is_finite(*row)],
    )


def _is_finite(*values: float) -> bool:
    return all(abs(value) < _GREATEST for value in values)  # which nan is not either


def _frame(chart: Chart) -> _Frame:
    xs = [x for line in chart.lines for x, _ in line.points]
    y = _y_ticks(chart)
    x_low, x_high = min(xs, default=0.0), max(xs, default=1.0)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    if x_low <= _NEAR_ZERO * x_high:
        x_low = 0.0
    x = ticks(max(0.0, x_low), x_high, 8, is_whole=True, is_fixed=True)
    left = _LEFT + _width(y.labels)
    right = WIDTH - _RIGHT - _width([guide.label for guide in chart.guides])
    return _Frame(left, right, _TOP, HEIGHT - _BOTTOM, x, y)


def _width(labels: Sequence[str]) -> float:
    """Of the widest, about."""
    return max(map(len, labels), default=0) * TICK_SIZE * _CHARACTER


def _y_ticks(chart: Chart) -> Ticks:
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [y for line in chart.lines for _, low, high in line.band for y in (low, high)]
    if chart.fixed_y is not None:
        low, high = chart.fixed_y
        if all(low <= y <= high for y in ys):
            return ticks(low, high, 4, is_fixed=True)
        ys += [low, high]
    ys += [guide.y for guide in chart.guides]
    if chart.floor is not None:
        ys.append(chart.floor)
    return ticks(min(ys, default=0.0), max(ys, default=1.0), 5, is_whole=chart.whole_y)


def _axes(chart: Chart, frame: _Frame, shapes: _Shapes) -> None:
    for value, label in zip(frame.y.values, frame.y.labels, strict=True):
        y = frame.at_y(value)
        shapes.add(Path(((frame.left, y), (frame.right, y)), "grid", 1.0))
        at = (frame.left - 7, y + TICK_SIZE * 0.36)
        shapes.add(Text(at, label, TICK_SIZE, "muted", "end"))
    for value, label in zip(frame.x.values, frame.x.labels, strict=True):
        x = frame.at_x(value)
        shapes.add(Path(((x, frame.bottom), (x, frame.bottom + 4)), "axis", 1.0))
        at = (x, frame.bottom + 8 + TICK_SIZE * 0.8)
        shapes.add(Text(at, label, TICK_SIZE, "muted", "middle"))
    corner = ((frame.left, frame.bottom), (frame.right, frame.bottom))
    shapes.add(Path(corner, "axis", 1.2))
    x_middle, y_middle = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    shapes.add(Text((x_middle, HEIGHT - 9), chart.x_label, LABEL_SIZE, "text", "middle"))
    shapes.add(Text((17.0, y_middle), chart.y_label, LABEL_SIZE, "text", "middle", turned=True))


def _guides(guides: Sequence[Guide], frame: _Frame, shapes: _Shapes) -> None:
    """Each with its label behind the plot, none on top of another."""
    free_y = HEIGHT
    for guide in sorted(guides, key=lambda one: one.y):
        y = frame.at_y(guide.y)
        shapes.add(Path(((frame.left, y), (frame.right, y)), "axis", 1.2, dashed=True))
        free_y = min(free_y, y + TICK_SIZE * 0.36)
        shapes.add(Text((frame.right + 6, free_y), guide.label, TICK_SIZE, "muted"))
        free_y -= _APART


def _line(line: Line, frame: _Frame, shapes: _Shapes) -> None:
    if line.band:
        upper = [frame.at((x, high)) for x, _, high in line.band]
        lower = [frame.at((x, low)) for x, low, _ in line.band]
        shapes.add(Area((*upper, *reversed(lower)), line.ink))
    points = [frame.at(point) for point in line.points]
    if len(points) > 1 and line.style != "dots":
        course = tuple(_stairs(points) if line.style == "steps" else points)
        shapes.add(Path(course, line.ink, 1.1 if line.style == "thin" else 2.0))
    if line.style in ("dots", "marked") or len(points) == 1:
        radius = 2.8 if len(points) <= MANY else 1.7
        shapes.add(*(Dot(point, line.ink, radius) for point in points))


def _stairs(points: Sequence[Point]) -> Iterable[Point]:
    yield points[0]
    for (_, before), (x, y) in pairwise(points):
        yield x, before
        yield x, y


def _legend(chart: Chart, frame: _Frame, shapes: _Shapes) -> None:
    """Above the plot; the only line of a chart is named by its axis."""
    entries = [(line.label, line.ink, line.style) for line in chart.lines if line.label]
    if len(entries) < 2:
        entries = []
    if any(frame.x.low < at < frame.x.high for at in chart.resumes[:MAX_RESUMES]):
        entries.append(("resumed", "guide", "thin"))
    x, y = frame.left, _TOP - 14
    for label, ink, style in entries:
        middle = y - TICK_SIZE * 0.36
        if style == "dots":
            shapes.add(Dot((x + 9, middle), ink, 3.0))
        else:
            width = 1.1 if style == "thin" else 2.4
            ends = ((x, middle), (x + 18, middle))
            shapes.add(Path(ends, ink, width, dashed=ink == "guide"))
        shapes.add(Text((x + 23, y), label, TICK_SIZE))
        x += 23 + len(label) * TICK_SIZE * _CHARACTER + 12
