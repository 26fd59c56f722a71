from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.report.ticks import short, ticks

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        (0.0, 8200.0, ("0", "2k", "4k", "6k", "8k", "10k")),
        (0.0, 42_000.0, ("0", "10k", "20k", "30k", "40k", "50k")),
        (0.0, 1e-5, ("0", "0.2e-5", "0.4e-5", "0.6e-5", "0.8e-5", "1.0e-5")),
        (-0.03, 0.03, ("-0.04", "-0.02", "0.00", "0.02", "0.04")),
    ],
)
def test_labels_of_one_axis_are_in_one_notation(
    low: float, high: float, labels: tuple[str, ...]
) -> None:
    assert ticks(low, high, 5).labels == labels


def test_a_fixed_axis_does_not_grow() -> None:
    found = ticks(0.99, 1.01, 4, is_fixed=True)
    assert (found.low, found.high) == (0.99, 1.01)
    assert found.labels == ("0.990", "0.995", "1.000", "1.005", "1.010")
    steps = ticks(3, 97, 8, is_whole=True, is_fixed=True)
    assert steps.values == (20.0, 40.0, 60.0, 80.0)


def test_steps_have_no_fractions() -> None:
    assert ticks(0, 2, 8, is_whole=True).values == (0.0, 1.0, 2.0)
    assert ticks(5, 5, 8, is_whole=True).values == (5.0, 6.0)


@given(NUMBERS, NUMBERS)
def test_ticks_hold_every_value_and_are_few(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, 5)
    assert found.low <= low + 1e-6 * max(1, high - low)
    assert found.high >= high - 1e-6 * max(1, high - low)
    assert 2 <= len(found.values) <= 9
    assert len(found.labels) == len(found.values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.68512, "0.685"),
        (1234.5, "1234"),
        (5_812_000.0, "5.81M"),
        (1e-5, "1e-5"),
        (math.nan, "nan"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert short(value) == text
