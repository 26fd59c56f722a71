import pytest

from asyncgrpo_agent.core.slots import needed_slots, slots_fault


def test_four_more_than_the_staleness() -> None:
    assert [needed_slots(staleness) for staleness in (0, 4)] == [4, 8]


@pytest.mark.parametrize(
    ("staleness", "loras", "cpu_loras"),
    [(4, 8, 0), (4, 8, 8), (4, 9, 18), (0, 4, 4), (-1, 1, 1)],
)
def test_enough(staleness: int, loras: int, cpu_loras: int) -> None:
    assert slots_fault(staleness, loras, cpu_loras) is None


def test_too_few_are_named_with_the_number_that_is_needed() -> None:
    fault = slots_fault(4, 7, 14)
    assert fault == (
        "its engine.max_loras is 7, and the run's max_staleness 4 needs 8: set it on that replica"
    )
    fault = slots_fault(6, 10, 8)
    assert fault is not None
    assert "keeps 8 adapters (--max-cpu-loras), and the run's max_staleness 6 needs 10" in fault
