import pytest

from asyncgrpo_agent.core.looks import AWAIT_S, HINTED_POLL_S, POLL_S, WATCHED_S, pause_s


@pytest.mark.parametrize(
    ("watched", "linked", "wait_s"),
    [
        (True, True, WATCHED_S),
        (True, False, WATCHED_S),
        (False, True, HINTED_POLL_S),
        (False, False, POLL_S),
    ],
)
def test_who_is_told_of_changes_looks_less_often(
    watched: bool, linked: bool, wait_s: float
) -> None:
    assert pause_s(watched=watched, linked=linked, retries_s=[], awaited_s=[]) == wait_s


def test_what_was_announced_is_looked_for_at_once_and_then_less_and_less() -> None:
    def awaited(seconds: float) -> float:
        return pause_s(watched=False, linked=True, retries_s=[], awaited_s=[seconds])

    assert awaited(0.0) == AWAIT_S
    assert awaited(10.0) == pytest.approx(0.4)
    assert awaited(3600.0) == HINTED_POLL_S


def test_a_folder_that_is_watched_tells_by_itself_when_a_commit_shows() -> None:
    assert pause_s(watched=True, linked=True, retries_s=[], awaited_s=[0.0]) == WATCHED_S


def test_a_failure_is_tried_again_when_it_is_due() -> None:
    assert pause_s(watched=True, linked=True, retries_s=[3.0, 0.5], awaited_s=[]) == 0.5
