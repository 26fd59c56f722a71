"""Jobs in slices. Writing, reading and removing are tested where they are used."""

import pytest

from asyncgrpo_agent.store.objects import Sliced, Steps, finished


def count_to(number: int, closed: list[str], error: Exception | None = None) -> Steps[int]:
    try:
        for _ in range(number):
            yield
        if error is not None:
            raise error
        return number
    finally:
        closed.append("closed")


def test_all_at_once() -> None:
    assert finished(count_to(3, [])) == 3
    assert finished(count_to(0, [])) == 0


def test_a_slice_is_one_step_at_least_and_a_result_can_be_heard_again() -> None:
    job = Sliced(count_to(3, []))
    assert [job.advance(0.0) for _ in range(5)] == [None, None, None, 3, 3]
    assert Sliced(count_to(1000, [])).advance(60.0) == 1000


def test_so_can_an_error() -> None:
    job = Sliced(count_to(1, [], ValueError("no")))
    assert job.advance(0.0) is None
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            job.advance(60.0)


def test_a_job_that_is_given_up_cleans_up() -> None:
    closed: list[str] = []
    job = Sliced(count_to(3, closed))
    job.advance(0.0)
    job.close()
    assert closed == ["closed"]
