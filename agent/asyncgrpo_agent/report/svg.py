"""A drawing as SVG that stands within a page, which has its colours."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from asyncgrpo_agent.report.charts import Area, Dot, Drawing, Path, Point, Shape, Text


def svg(drawing: Drawing, label: str) -> str:
    """`label` is read out instead of the picture."""
    shapes = "\n".join(map(_shape, drawing.shapes))
    box = f"0 0 {drawing.width:g} {drawing.height:g}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">\n{shapes}\n</svg>'


def _shape(shape: Shape) -> str:
    match shape:
        case Path():
            dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
            ink, width = f"s-{shape.ink}", f"{shape.width:g}"
            line = f'<polyline class="{ink}" points="{_points(shape.points)}"'
            return f'{line} stroke-width="{width}"{dashes}/>'
        case Area():
            return f'<polygon class="a-{shape.ink}" points="{_points(shape.points)}"/>'
        case Dot():
            x, y = shape.at
            return f'<circle class="f-{shape.ink}" cx="{x:g}" cy="{y:g}" r="{shape.radius:g}"/>'
        case Text():
            return _text(shape)


def _text(shape: Text) -> str:
    x, y = shape.at
    bold = ' font-weight="600"' if shape.bold else ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    turned = f' transform="rotate(-90 {x:g} {y:g})"' if shape.turned else ""
    return (
        f'<text class="f-{shape.ink}" x="{x:g}" y="{y:g}" font-size="{shape.size:g}"'
        f"{anchor}{bold}{turned}>{escape(shape.text)}</text>"
    )


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
