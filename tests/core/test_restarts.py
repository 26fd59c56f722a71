"""When a trainer that failed is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.restarts import Again, Failure, Stop, next_start

lives = st.lists(
    st.builds(
        lambda began, more: Failure(began_at=began, step=began + more),
        st.integers(0, 20),
        st.integers(0, 3),
    ),
    min_size=1,
)


def failures(*lives: tuple[int, int]) -> list[Failure]:
    return [Failure(began_at=began, step=step) for began, step in lives]


def test_a_failure_after_new_steps_is_tried_again() -> None:
    decision = next_start(failures((0, 7)), 3)
    assert isinstance(decision, Again)
    assert decision.has_progressed


def test_a_failure_before_the_first_step_is_not() -> None:
    assert next_start(failures((100, 100)), 3) == Stop(reason="it failed before its first step")


def test_the_same_step_again_and_again_ends_it() -> None:
    """Though each start trains the steps since the checkpoint once more."""
    assert isinstance(next_start(failures((0, 7), (5, 7), (5, 6)), 3), Again)
    decision = next_start(failures((0, 7), (5, 7), (5, 6), (5, 7)), 3)
    assert decision == Stop(reason="3 starts in a row did not get beyond step 7")


def test_progress_forgives() -> None:
    assert isinstance(next_start(failures((0, 7), (5, 7), (5, 7), (5, 9), (5, 9)), 3), Again)


def test_none_are_allowed() -> None:
    assert next_start(failures((0, 7)), 0) == Stop(reason="trainer.restarts is 0")


@given(lives=lives, allowed=st.integers(1, 4))
def test_without_progress_it_always_ends(lives: list[Failure], allowed: int) -> None:
    furthest = max(failure.step for failure in lives)
    stuck = Failure(began_at=min(furthest, 3), step=furthest)
    assert isinstance(next_start([*lives, *[stuck] * (allowed + 1)], allowed), Stop)
