from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.backoff import Backoff


class TopRandom(Random):
    """Draws the upper end, so that ceilings become visible."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_ceiling_doubles_up_to_the_cap() -> None:
    backoff = Backoff(TopRandom())
    assert [backoff.next_delay_s() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_short_connection_keeps_the_ceiling() -> None:
    backoff = Backoff(TopRandom())
    backoff.next_delay_s()
    backoff.connected(100.0)
    backoff.lost(129.9)
    assert backoff.next_delay_s() == 2


def test_healthy_connection_resets_the_ceiling() -> None:
    backoff = Backoff(TopRandom())
    for _ in range(6):
        backoff.next_delay_s()
    backoff.connected(100.0)
    backoff.lost(130.0)
    assert backoff.next_delay_s() == 1


def test_lost_without_a_connection_changes_nothing() -> None:
    backoff = Backoff(TopRandom())
    backoff.next_delay_s()
    backoff.lost(1_000.0)
    backoff.connected(1_000.0)
    backoff.lost(1_000.0)
    backoff.lost(2_000.0)
    assert backoff.next_delay_s() == 2


@given(seed=st.integers(), attempts=st.integers(1, 200))
def test_delays_stay_within_the_cap(seed: int, attempts: int) -> None:
    backoff = Backoff(Random(seed), base_s=0.5, cap_s=7.0)
    assert all(0 <= backoff.next_delay_s() <= 7.0 for _ in range(attempts))
