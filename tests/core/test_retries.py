from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.retries import BURST, SHARE, TRICKLE_PER_S, RetryBudget


def test_a_lost_replica_costs_nothing() -> None:
    budget = RetryBudget()
    waits_s = [budget.retry(1.0, answered=False, may_have_run=True) for _ in range(500)]
    assert set(waits_s) == {0.0}
    assert (budget.retried, budget.duplicates, budget.delayed) == (500, 500, 0)


def test_beyond_the_burst_retries_wait_and_requests_earn_them() -> None:
    budget = RetryBudget()
    waits_s = [budget.retry(0.0, answered=True, may_have_run=False) for _ in range(40)]
    assert waits_s[: int(BURST)] == [0.0] * int(BURST)
    assert waits_s[int(BURST) :] == [float(n) for n in range(1, 9)]
    for _ in range(100):
        budget.request()
    assert budget.retry(0.0, answered=True, may_have_run=False) == 0.0
    assert (budget.duplicates, budget.delayed) == (0, 8)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200))
def test_retries_started_never_exceed_the_budget(events: list[tuple[float, bool]]) -> None:
    budget, now, starts_s = RetryBudget(), 0.0, list[float]()
    for seconds, is_retry in events:
        now += seconds
        if is_retry:
            starts_s.append(now + budget.retry(now, answered=True, may_have_run=False))
        else:
            budget.request()
        started = sum(start_s <= now for start_s in starts_s)
        assert started <= BURST + SHARE * budget.requests + TRICKLE_PER_S * now + 1e-6
