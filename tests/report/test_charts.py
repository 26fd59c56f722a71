from __future__ import annotations

from dataclasses import replace

from asyncgrpo_agent.report.charts import (
    HEIGHT,
    WIDTH,
    Area,
    Chart,
    Dot,
    Drawing,
    Guide,
    Line,
    Path,
    Text,
    draw,
)

CHART = Chart(
    title="Reward",
    x_label="optimizer step",
    y_label="mean reward",
    lines=[Line(label="each step", points=[(1.0, 0.0), (50.0, 0.4), (100.0, 1.0)])],
)


def texts(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


def course(drawing: Drawing) -> Path:
    (found,) = [s for s in drawing.shapes if isinstance(s, Path) and s.ink == "c0"]
    return found


def test_axes_say_what_they_are() -> None:
    shown = texts(draw(CHART))
    assert shown[0] == "Reward"
    assert {"optimizer step", "mean reward", "0.0", "1.0", "0", "100"} <= set(shown)


def test_values_are_where_their_ticks_are() -> None:
    drawing = draw(CHART)
    line = course(drawing)
    places = {shape.text: shape.at for shape in drawing.shapes if isinstance(shape, Text)}
    assert line.points[-1][0] == places["100"][0]
    assert abs(line.points[-1][1] - places["1.0"][1]) < 6
    assert [x for x, _ in line.points] == sorted(x for x, _ in line.points)
    assert [y for _, y in line.points] == sorted((y for _, y in line.points), reverse=True)


def test_nothing_is_drawn_beyond_the_drawing() -> None:
    chart = replace(
        CHART, fixed_y=(0.9, 1.1), guides=[Guide(y=4.0, label="limit")], resumes=[2.0, 500.0]
    )
    for shape in draw(chart).shapes:
        points = shape.points if isinstance(shape, (Path, Area)) else (shape.at,)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points), shape


def test_an_axis_is_fixed_as_long_as_the_values_keep_to_it() -> None:
    narrow = replace(
        CHART, fixed_y=(0.99, 1.01), lines=[Line(label="r", points=[(1, 0.995), (2, 1.004)])]
    )
    assert {"0.990", "1.010"} <= set(texts(draw(narrow)))
    wide = replace(narrow, lines=[Line(label="r", points=[(1, 0.9), (2, 1.2)])])
    assert "1.010" not in texts(draw(wide))


def test_labels_of_guides_do_not_cover_each_other() -> None:
    chart = replace(
        CHART, guides=[Guide(y=0.5, label="p50"), Guide(y=0.51, label="p95")], floor=0.0
    )
    places = {s.text: s.at for s in draw(chart).shapes if isinstance(s, Text)}
    assert places["p50"][1] - places["p95"][1] >= 12


def test_a_resume_is_marked_and_explained() -> None:
    assert "resumed" not in texts(draw(CHART))
    drawing = draw(replace(CHART, resumes=[50.0]))
    assert "resumed" in texts(drawing)
    marks = [s for s in drawing.shapes if isinstance(s, Path) and s.dashed]
    assert len(marks) == 2  # one is the legend's


def test_lines_of_every_style() -> None:
    points = [(1.0, 1.0), (2.0, 3.0)]
    steps = draw(replace(CHART, lines=[Line(label="s", points=points, style="steps")]))
    assert len(course(steps).points) == 3
    dots = draw(replace(CHART, lines=[Line(label="d", points=points, style="dots")]))
    assert sum(isinstance(s, Dot) for s in dots.shapes) == 2
    banded = Line(label="b", points=points, band=[(1.0, 0.0, 2.0), (2.0, 2.0, 5.0)])
    (area,) = [s for s in draw(replace(CHART, lines=[banded])).shapes if isinstance(s, Area)]
    assert len(area.points) == 4


def test_what_is_no_number_is_not_drawn() -> None:
    points = [(1.0, 1.0), (2.0, float("inf")), (3.0, float("nan")), (4.0, 2.0), (5.0, 1e300)]
    line = Line(label="x", points=points, band=[(1.0, float("nan"), 1.0)])
    assert len(course(draw(replace(CHART, lines=[line]))).points) == 2


def test_a_single_value_and_none_at_all() -> None:
    one = draw(replace(CHART, lines=[Line(label="x", points=[(7.0, 0.25)])]))
    assert sum(isinstance(s, Dot) for s in one.shapes) == 1
    assert "nothing was logged" in texts(draw(replace(CHART, lines=[])))
