from __future__ import annotations

from typing import Any

import pytest

from asyncgrpo_agent.core.adapter_log import AdapterLog, ReplicaTimes

ATTEMPT = "a0001-7f3c"


def name(version: int, attempt: str = ATTEMPT) -> str:
    return f"demo.{attempt}.v{version:06d}.0123456789ab"


def fold(*records: dict[str, Any]) -> AdapterLog:
    log = AdapterLog()
    for number, record in enumerate(records):
        log.add({"t": 100.0 + number, **record})
    return log


def started(attempt: str = ATTEMPT) -> dict[str, Any]:
    return {"kind": "started", "attempt": attempt}


def published(version: int, attempt: str = ATTEMPT, **fields: Any) -> dict[str, Any]:
    live = [name(v, attempt) for v in range(max(0, version - 1), version + 1)]
    record = {"adapter": name(version, attempt), "live": live, "seconds": 0.5}
    return {"kind": "published", "uploaded_s": 0.25, "announced_s": 0.5, **record, **fields}


def ack(replica: str, version: int = 1, **fields: Any) -> dict[str, Any]:
    record = {"kind": "ack", "replica": replica, "adapter": name(version), "ok": True, "reason": ""}
    return record | {"phases_s": {}} | fields


def step(reward: float, staleness: float = 0.0) -> dict[str, Any]:
    return {"kind": "metrics", "values": {"reward": reward, "sample/staleness_mean": staleness}}


def trained(*rewards: float) -> list[dict[str, Any]]:
    """A step on each version's own samples."""
    return [r for v, reward in enumerate(rewards) for r in (published(v), step(reward))]


# --- times -----------------------------------------------------------------------------------


def test_a_replicas_durations_are_counted_back_from_its_ack() -> None:
    phases_s = {"visible": 0.125, "staged": 0.75, "read": 0.25, "check": 0.125, "sync": 0.125}
    phases_s |= {"loaded": 0.125, "total": 1.0, "acked": 1.25}
    log = fold(started(), published(1), ack("r1", phases_s=phases_s))
    times = log.times(name(1))
    assert (times.saved_unix_s, times.uploaded_s, times.announced_s) == (100.5, 0.25, 0.5)
    assert times.replicas == (
        ReplicaTimes(
            replica="r1",
            ok=True,
            visible_s=0.375,
            copied_s=0.75,
            verified_s=1.0,
            loaded_s=1.25,
            acked_s=1.5,
        ),
    )


def test_what_was_not_recorded_is_not_made_up() -> None:
    log = fold(started(), published(1, announced_s=None), ack("r1"))
    assert log.times(name(1)).announced_s is None
    assert log.times(name(1)).replicas == (ReplicaTimes(replica="r1", ok=True, acked_s=1.5),)
    assert log.times(name(2)).saved_unix_s is None
    early = fold(ack("r1"))
    assert early.times(name(1)).replicas == ()
    staged_before = {"check": 0.5, "staged": 0.5, "total": 1.0, "acked": 1.0}
    (times,) = fold(published(1), ack("r1", phases_s=staged_before)).times(name(1)).replicas
    assert (times.visible_s, times.copied_s, times.verified_s) == (None, None, 1.0)


def test_a_refusal_counts_until_the_replica_has_it_and_a_second_load_does_not() -> None:
    refused = ack("r1", ok=False, reason="corrupt")
    assert fold(published(1), refused).times(name(1)).slowest() is None
    assert fold(published(1), refused).times(name(1)).replicas[0].reason == "corrupt"
    (times,) = fold(published(1), refused, ack("r1"), ack("r1")).times(name(1)).replicas
    assert (times.ok, times.acked_s) == (True, 2.5)


def test_the_slowest_replica_is_the_last_to_ack() -> None:
    log = fold(published(1), ack("b"), ack("c"), ack("a", ok=False, reason="full"))
    slowest = log.times(name(1)).slowest()
    assert slowest is not None
    assert (slowest.replica, slowest.acked_s) == ("c", 2.5)


# --- who holds it, what is live --------------------------------------------------------------


def holds(replica: str, *versions: int) -> dict[str, Any]:
    return {"kind": "holds", "replica": replica, "loaded": [name(v) for v in versions]}


def test_holders_are_those_that_last_said_so_and_are_still_there() -> None:
    gone = {"kind": "replica", "name": "a", "state": "GONE", "reason": "its link ended"}
    ready = {"kind": "replica", "name": "a", "state": "READY", "reason": ""}
    records = [started(), holds("b", 1), holds("a", 1, 2), holds("b", 1, 2), holds("a", 2)]
    assert fold(*records, ready).holders(name(2)) == ["a", "b"]
    assert fold(*records).holders(name(1)) == ["b"]
    assert fold(*records, gone).holders(name(2)) == ["b"]
    assert fold(*records, {"kind": "ended", "ok": False}).holders(name(2)) == []
    # a trainer that was killed said nothing; the next one starts from nothing
    assert fold(*records, {"kind": "phase", "phase": "checking"}).holders(name(2)) == []


def test_live_is_what_was_published_and_not_retired() -> None:
    log = fold(started(), published(1), published(2))
    assert log.live(ATTEMPT) == [name(1), name(2)]
    assert log.live("a0002-0000") is None
    retired = {"kind": "retired", "names": [name(1)], "live": [name(2)]}
    assert fold(started(), published(2), retired).live(ATTEMPT) == [name(2)]
    ended = {"kind": "ended", "ok": True}
    assert fold(started(), published(2), ended).live(ATTEMPT) == []


@pytest.mark.parametrize(
    ("records", "well"),
    [
        ([], False),
        ([started()], False),
        ([started(), {"kind": "ended", "ok": False}], False),
        ([started(), {"kind": "ended", "ok": True}], True),
        ([started(), {"kind": "ended", "ok": True}, started("a0002-0000")], True),
        # a start that came to nothing says nothing of the one before it
        ([started(), {"kind": "phase", "phase": "checking"}, {"kind": "ended", "ok": True}], False),
        ([started(), {"kind": "ended", "ok": True}, {"kind": "ended", "ok": False}], True),
    ],
)
def test_whether_an_attempt_has_ended_well(records: list[dict[str, Any]], well: bool) -> None:
    assert fold(*records).ended_well(ATTEMPT) is well


# --- the best --------------------------------------------------------------------------------


def best(log: AdapterLog, *versions: int) -> int | None:
    choice = log.best(ATTEMPT, versions)
    return None if choice is None else choice.version


def test_the_best_has_the_highest_reward_around_it() -> None:
    """One lucky step does not make a version the best."""
    rewards = [0.1, 0.9, 0.1, 0.1, 0.5, 0.6, 0.6, 0.6, 0.5, 0.1, 0.1, 0.1]
    log = fold(started(), *trained(*rewards))
    choice = log.best(ATTEMPT, range(12))
    assert choice is not None
    assert choice.version == 6
    assert choice.reason == "reward 0.560, mean of 5 training steps around it"
    assert best(log, 1, 11) == 1  # of those that are still in the bucket
    assert best(log, 20) is None
    assert best(log) is None


def test_a_reward_is_of_the_version_that_the_samples_came_from() -> None:
    stale = [r for v in range(12) for r in (published(v), step(float(v == 9), staleness=4.2))]
    log = fold(started(), *stale)
    # the good samples came from version 5, which is in the mean of 3 and not in that of 2
    assert best(log, 2, 3) == 3
    assert best(log, 0, 1, 2) == 2


def test_a_few_steps_at_the_end_are_no_mean() -> None:
    log = fold(started(), *trained(0.2, 0.2, 0.2, 0.2, 0.2, 0.9))
    assert best(log, 1, 7) == 1  # version 7 has one good step near it
    assert best(log, 7) == 7
    assert best(fold(started(), *trained(0.5)), 0) == 0


def test_of_equals_the_newest() -> None:
    assert best(fold(started(), *trained(*[0.5] * 6)), 0, 2, 3) == 3


def test_evaluations_come_before_rewards() -> None:
    def evaluated(policy: str, accuracy: float) -> dict[str, Any]:
        return {"kind": "eval", "when": "x", "name": policy, "accuracy": accuracy}

    records = [started(), evaluated("base", 0.99), *trained(0.1, 0.9, 0.1)]
    assert best(fold(*records), 0, 1, 2) == 2  # the base model is none of the run's adapters
    records += [evaluated("trl-policy-v0", 0.75), evaluated("trl-policy-v2", 0.5)]
    choice = fold(*records).best(ATTEMPT, [0, 1, 2])
    assert choice is not None
    assert (choice.version, choice.reason) == (0, "accuracy 0.750, best of 2 evaluated")
    assert best(fold(*records), 1, 2) == 2


def test_attempts_are_kept_apart() -> None:
    other = "a0002-0000"
    log = fold(started(), *trained(0.9, 0.9, 0.9), started(other), published(0, other), step(0.1))
    assert best(log, 0, 1, 2) == 2
    choice = log.best(other, [0, 1, 2])
    assert choice is not None
    assert choice.reason == "reward 0.100, mean of 1 training steps around it"
    assert log.best("a0003-0000", [0, 1, 2]) is None
