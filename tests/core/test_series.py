import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.series import BINS, MAX_NAMES, SeriesStore


def filled(steps: int, names: int = 1) -> SeriesStore:
    store = SeriesStore()
    for step in range(1, steps + 1):
        store.add(step, 1000.0 + step, {f"m{n}": float(step) for n in range(names)})
    return store


def test_a_short_run_comes_back_as_it_was_logged() -> None:
    store = filled(5)
    read = store.read(["m0", "unknown"], 600)
    assert read.step == [0, 1, 2, 3, 4, 5]
    assert read.series == {
        "m0": {which: [None, 1.0, 2.0, 3.0, 4.0, 5.0] for which in ("mean", "min", "max")}
    }
    assert read.unix_s == [None, 1001.0, 1002.0, 1003.0, 1004.0, 1005.0]
    assert not read.down_sampled


def test_a_long_run_is_down_sampled_and_keeps_its_extremes() -> None:
    store = SeriesStore()
    for step in range(10_000):
        store.add(step, float(step), {"reward": 0.5 + (step == 7777), "loss": -step})
    read = store.read(["reward"], 600)
    assert read.down_sampled
    assert len(read.step) <= 600
    assert {b - a for a, b in pairwise(read.step)} == {read.steps_a_point}
    assert max(v for v in read.series["reward"]["max"] if v is not None) == 1.5
    assert min(v for v in read.series["reward"]["min"] if v is not None) == 0.5


def test_memory_is_bounded() -> None:
    store = filled(10_000, names=60)
    assert store.size_bytes < 2e6
    for n in range(2 * MAX_NAMES):
        store.add(10_001, 1.0, {f"other{n}": 1.0})
    assert len(store.names) == MAX_NAMES
    assert store.left_out


def test_a_resume_replaces_what_came_after_its_step() -> None:
    store = filled(20)
    store.cut(10)
    assert store.last_step == 10
    for step in range(11, 15):
        store.add(step, 2000.0, {"m0": -1.0})
    assert store.read(["m0"], 600).series["m0"]["mean"][9:] == [9.0, 10.0, -1.0, -1.0, -1.0, -1.0]


def test_what_is_no_number_is_left_out() -> None:
    store = SeriesStore()
    store.add(1, 1.0, {"a": math.nan, "b": math.inf, "c": 1.0})
    store.add(-1, 1.0, {"d": 1.0})
    assert store.names == ["c"]


@given(st.integers(1, 5 * BINS), st.integers(1, 700), st.integers(0, 2**32))
def test_the_mean_over_all_bins_is_that_of_all_steps(steps: int, points: int, seed: int) -> None:
    rng, store = random.Random(seed), SeriesStore()
    logged = sorted(rng.sample(range(steps), max(1, steps // 7)))
    for step in logged:
        store.add(step, 1.0, {"m": float(step)})
    read = store.read(["m"], points)
    assert len(read.step) <= points
    filled_bins = [v for v in read.series["m"]["mean"] if v is not None]
    assert min(filled_bins) >= logged[0] * 0.999
    assert max(filled_bins) <= logged[-1] * 1.001
    assert store.last_step == logged[-1]
