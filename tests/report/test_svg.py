from __future__ import annotations

from xml.etree import ElementTree

from asyncgrpo_agent.report.charts import Area, Dot, Drawing, Path, Text
from asyncgrpo_agent.report.svg import svg


def test_every_shape_is_well_formed() -> None:
    shapes = (
        Path(((0.0, 1.0), (2.5, 3.25)), "c0", 2.0, dashed=True),
        Area(((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)), "soft"),
        Dot((4.0, 5.0), "bad", 2.0),
        Text((1.0, 2.0), "a < b & c", 12.0, "muted", "end", bold=True, turned=True),
    )
    root = ElementTree.fromstring(svg(Drawing(10.0, 20.0, shapes), 'the "label"'))
    assert root.attrib["viewBox"] == "0 0 10 20"
    assert root.attrib["aria-label"] == 'the "label"'
    line, area, dot, text = root
    assert (line.attrib["points"], line.attrib["class"]) == ("0,1 2.5,3.25", "s-c0")
    assert (area.attrib["class"], dot.attrib["r"]) == ("a-soft", "2")
    assert text.text == "a < b & c"
    assert text.attrib["transform"] == "rotate(-90 1 2)"
