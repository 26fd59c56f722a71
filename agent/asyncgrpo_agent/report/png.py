"""Drawings as PNG images on white, twice as wide as they are laid out, for a paper.

Pillow has no smooth lines, so that all is drawn four times as large and then reduced. Its own font
knows Latin-1 without some signs, which is all that charts use.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import hypot
from typing import Final

from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from asyncgrpo_agent.report.charts import Area, Dot, Drawing, Path, Point, Text

SCALE: Final = 2
_OVER: Final = 3  # how many times larger it is drawn
_ALL: Final = SCALE * _OVER
_DPI: Final = 192
_DASH: Final = (4.0, 3.0)
_INKS: Final = {
    "text": "#1b1f24",
    "muted": "#57606a",
    "grid": "#e4e7eb",
    "axis": "#8c959f",
    "guide": "#8c959f",
    "bad": "#cf222e",
    "soft": "#a3c8ec",
    "c0": "#0b6bcb",
    "c1": "#d9730d",
    "c2": "#12805c",
    "c3": "#8250df",
}
_BAND_SHARE: Final = 0.18
_SOFT_BAND_SHARE: Final = 0.45
_PLAIN: Final = str.maketrans({"\u2013": "-", "\u2014": "-", "\u00d7": "x", "\u00b5": "u"})


def images(drawings: Sequence[Drawing], columns: int) -> tuple[list[bytes], bytes]:
    """Each drawing by itself, and all of them on one sheet, row by row. There is one at least."""
    made = [_image(drawing) for drawing in drawings]
    width, height = max(one.width for one in made), max(one.height for one in made)
    sheet = Image.new("RGB", (columns * width, -(-len(made) // columns) * height), "white")
    for number, image in enumerate(made):
        sheet.paste(image, (number % columns * width, number // columns * height))
    return [_encoded(image) for image in made], _encoded(sheet)


def _encoded(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, PngImagePlugin.PngImageFile.format, dpi=(_DPI, _DPI))
    return data.getvalue()


def _image(drawing: Drawing) -> Image.Image:
    size = (round(drawing.width * _ALL), round(drawing.height * _ALL))
    large = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(large)
    for shape in drawing.shapes:
        match shape:
            case Area():
                _area(large, shape)
            case Path(dashed=True):
                for dash in _dashes(shape.points):
                    _path(draw, dash, shape)
            case Path():
                _path(draw, shape.points, shape)
            case Dot():
                (x, y), r = shape.at, shape.radius
                box = [(x - r) * _ALL, (y - r) * _ALL, (x + r) * _ALL, (y + r) * _ALL]
                draw.ellipse(box, fill=_INKS[shape.ink])
            case Text():
                _text(large, draw, shape)
    return large.reduce(_OVER)


def _path(draw: ImageDraw.ImageDraw, points: Sequence[Point], path: Path) -> None:
    places = [(x * _ALL, y * _ALL) for x, y in points]
    draw.line(places, fill=_INKS[path.ink], width=round(path.width * _ALL), joint="curve")


def _dashes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Of straight lines, which is all that is dashed."""
    found: list[tuple[Point, Point]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        length = hypot(x1 - x0, y1 - y0)
        at = 0.0
        while at < length:
            end = min(length, at + _DASH[0])
            dash = [
                (x0 + (x1 - x0) * part / length, y0 + (y1 - y0) * part / length)
                for part in (at, end)
            ]
            found.append((dash[0], dash[1]))
            at += sum(_DASH)
    return found


def _area(large: Image.Image, area: Area) -> None:
    mask = Image.new("L", large.size, 0)
    places = [(x * _ALL, y * _ALL) for x, y in area.points]
    share = _SOFT_BAND_SHARE if area.ink == "soft" else _BAND_SHARE
    ImageDraw.Draw(mask).polygon(places, fill=round(255 * share))
    large.paste(_INKS[area.ink], (0, 0, *large.size), mask)


def _text(large: Image.Image, draw: ImageDraw.ImageDraw, text: Text) -> None:
    font, shown = _font(text.size), text.text.translate(_PLAIN)
    weight = round(0.022 * text.size * _ALL) if text.bold else 0
    x, y = text.at[0] * _ALL, text.at[1] * _ALL
    length = font.getlength(shown)
    before = {"start": 0.0, "middle": length / 2, "end": length}[text.anchor]
    ink = _INKS[text.ink]
    if not text.turned:
        at = (x - before, y)
        draw.text(at, shown, fill=ink, font=font, anchor="ls", stroke_width=weight)
        return
    height = round(text.size * 1.6 * _ALL)
    line = Image.new("L", (round(length) + 2, height), 0)
    base = round(text.size * 1.2 * _ALL)
    ImageDraw.Draw(line).text((0, base), shown, fill=255, font=font, anchor="ls")
    upright = line.rotate(90, expand=True)
    place = (round(x) - base, round(y + before) - upright.height)
    large.paste(ink, (*place, place[0] + upright.width, place[1] + upright.height), upright)


@lru_cache(maxsize=8)
def _font(size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size * _ALL)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow is built with FreeType"
    return font
