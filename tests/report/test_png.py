from __future__ import annotations

import io

from PIL import Image

from asyncgrpo_agent.report.charts import Area, Dot, Drawing, Path, Text, draw
from asyncgrpo_agent.report.figures import figures
from asyncgrpo_agent.report.png import images
from asyncgrpo_agent.report.run import Run
from fakes.histories import simulated


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def drawn(*shapes: Path | Area | Dot | Text) -> Image.Image:
    (single,), sheet = images([Drawing(60.0, 40.0, shapes)], 1)
    assert single == sheet
    return opened(single)


def inked(image: Image.Image, box: tuple[int, int, int, int]) -> bool:
    return min(image.crop(box).convert("L").tobytes()) < 200


def test_shapes_are_where_they_were_laid_out_at_twice_the_size() -> None:
    image = drawn(Path(((10.0, 20.0), (50.0, 20.0)), "c0", 2.0))
    assert image.size == (120, 80)
    assert image.getpixel((60, 40)) == (11, 107, 203)
    assert image.getpixel((60, 50)) == (255, 255, 255)
    dashes = drawn(Path(((0.0, 20.0), (60.0, 20.0)), "c0", 2.0, dashed=True))
    row = [dashes.getpixel((x, 40)) == (255, 255, 255) for x in range(120)]
    assert any(row)
    assert not all(row)
    assert drawn(Dot((30.0, 20.0), "bad", 3.0)).getpixel((60, 40)) == (207, 34, 46)
    shade = drawn(Area(((0.0, 0.0), (60.0, 0.0), (60.0, 40.0), (0.0, 40.0)), "c0"))
    assert shade.getpixel((60, 40)) not in ((255, 255, 255), (11, 107, 203))


def test_texts_stand_where_their_anchor_says() -> None:
    right = (61, 0, 120, 80)
    assert not inked(drawn(Text((30.0, 24.0), "abc", 12.0, anchor="end")), right)
    assert inked(drawn(Text((30.0, 24.0), "abc", 12.0)), right)
    upright = drawn(Text((30.0, 20.0), "abcdef", 12.0, anchor="middle", turned=True))
    assert inked(upright, (40, 10, 62, 70))
    assert not inked(upright, (70, 0, 120, 80))
    assert not inked(upright, (0, 0, 30, 80))


def test_the_charts_of_a_run_have_their_size_and_go_on_one_sheet() -> None:
    run = Run()
    run.add_all(simulated(20, resume_at=None))
    drawings = [draw(figure.chart) for figure in figures(run)[:3]]
    single, sheet = images(drawings, 2)
    image = Image.open(io.BytesIO(single[0]))
    assert image.size == (1240, 660)
    assert round(image.info["dpi"][0]) == 192
    assert opened(sheet).size == (2480, 1320)
