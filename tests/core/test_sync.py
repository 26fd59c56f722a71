from asyncgrpo_agent.core.sync import Sync


def sync(capacity: dict[str, int], quorum: float = 0.5) -> Sync:
    return Sync(adapter="x", started=100.0, quorum=quorum, timeout_s=30, capacity=capacity)


def test_half_of_the_capacity_is_enough() -> None:
    one = sync({"big": 64, "small": 16})
    assert not one.verdict(100.0).done
    one.ack("small", 100.2)
    assert not one.verdict(100.2).done
    one.ack("big", 100.5)
    verdict = one.verdict(100.5)
    assert verdict.done
    assert not verdict.timed_out
    assert one.acked == {"small": 0.20000000000000284, "big": 0.5}


def test_nobody_to_wait_for() -> None:
    assert sync({}).verdict(100.0).done


def test_the_deadline_ends_it_with_whatever_came() -> None:
    one = sync({"a": 1, "b": 1}, quorum=1.0)
    one.ack("a", 101.0)
    assert not one.verdict(129.9).done
    verdict = one.verdict(130.0)
    assert verdict.done
    assert verdict.timed_out
    assert verdict.reason.endswith("no answer from b")
    told = one.verdict(130.0, {"a": "is fine", "b": "not visible 30 s after it was announced"})
    assert told.reason.endswith("no answer from b (not visible 30 s after it was announced)")


def test_failures_end_it_without_waiting_for_the_deadline() -> None:
    one = sync({"a": 1, "b": 1}, quorum=1.0)
    one.fail("a", "refused")
    one.ack("b", 100.1)
    assert one.verdict(100.1).done
    assert one.failed == {"a": "refused"}


def test_a_replica_that_leaves_takes_its_share_along() -> None:
    one = sync({"a": 10, "b": 90})
    one.ack("a", 100.1)
    assert not one.verdict(100.1).done
    one.gone("b")
    assert one.verdict(100.1).done


def test_a_late_success_clears_a_failure() -> None:
    one = sync({"a": 1})
    one.fail("a", "try again")
    one.ack("a", 100.3)
    assert one.failed == {}
    assert one.verdict(100.3).done


def test_quorum_zero_returns_at_once() -> None:
    assert sync({"a": 1}, quorum=0.0).verdict(100.0).done
