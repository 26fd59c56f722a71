from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.children import (
    CAP_S,
    NEVER_READY,
    STABLE_S,
    Exit,
    GiveUp,
    Restart,
    how_it_ended,
    next_restart,
)

CRASH = Exit(code=1, ready=True, lived_s=5.0)
IN_VAIN = Exit(code=1, ready=False, lived_s=5.0)
LONG_LIFE = Exit(code=-9, ready=True, lived_s=STABLE_S)
lives = st.builds(
    Exit, code=st.integers(-64, 255), ready=st.booleans(), lived_s=st.floats(0, 10 * STABLE_S)
)


def delay_s(exits: list[Exit]) -> float:
    decision = next_restart(exits)
    assert isinstance(decision, Restart)
    return decision.delay_s


def test_delay_doubles_up_to_the_cap() -> None:
    delays = [delay_s([CRASH] * count) for count in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 32, CAP_S, CAP_S]


def test_weeks_of_crashes_do_not_overflow() -> None:
    assert delay_s([CRASH] * 5000) == CAP_S


def test_long_life_forgets_earlier_failures() -> None:
    assert delay_s([CRASH, CRASH, CRASH, LONG_LIFE]) == 1
    assert delay_s([CRASH, CRASH, LONG_LIFE, CRASH]) == 1


def test_child_that_never_comes_up_is_given_up() -> None:
    assert isinstance(next_restart([IN_VAIN]), GiveUp)


def test_child_that_worked_before_gets_several_tries() -> None:
    assert isinstance(next_restart([CRASH, *[IN_VAIN] * (NEVER_READY - 1)]), Restart)
    assert next_restart([CRASH, *[IN_VAIN] * NEVER_READY]) == GiveUp(
        reason="it did not become ready again, 3 times in a row"
    )


def test_one_good_start_between_counts() -> None:
    assert isinstance(next_restart([IN_VAIN, IN_VAIN, CRASH, IN_VAIN, IN_VAIN]), Restart)


def test_wrong_configuration_is_given_up_at_once() -> None:
    assert isinstance(next_restart([Exit(code=78, ready=False, lived_s=0.5)]), GiveUp)


@given(st.lists(lives, min_size=1, max_size=20))
def test_every_decision_has_a_reason_and_a_bounded_delay(exits: list[Exit]) -> None:
    decision = next_restart(exits)
    assert decision.reason
    assert isinstance(decision, GiveUp) or 0 < decision.delay_s <= CAP_S


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL, maybe out of memory,"),
        (-200, "killed by signal 200"),
    ],
)
def test_exit_status_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
