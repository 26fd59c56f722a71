from __future__ import annotations

import math

from asyncgrpo_agent.core.metric_model import Family, Histogram, one, one_of

FAMILY = Family("x", "gauge", "Help.", ("state",))


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((1.0, 5.0))
    for value in (0.2, 1.0, 1.1, 7.0):
        histogram.observe(value)
    assert histogram.buckets == [("1.0", 2.0), ("5.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 9.3


def test_what_is_not_known_makes_no_sample() -> None:
    assert list(one(FAMILY, ("a",), None)) == []
    assert list(one(FAMILY, ("a",), math.nan)) == []


def test_of_a_set_of_states_one_holds() -> None:
    samples = list(one_of(FAMILY, (), ("on", "off"), "off"))
    assert [(one.labels, one.value) for one in samples] == [(("on",), 0.0), (("off",), 1.0)]
