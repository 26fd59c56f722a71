"""Each alert begins beyond its limit, and one that goes to and fro is one."""

from collections.abc import Sequence

import pytest

from asyncgrpo_agent.core.alerts import (
    CLEAR_AFTER_S,
    STEPS,
    WINDOW_S,
    Board,
    Finding,
    Limits,
    ReplicaFacts,
    RunFacts,
    Tries,
    look,
)
from asyncgrpo_agent.core.sync_rows import ReplicaSync, SyncRow

LIMITS = Limits()


def kinds(facts: RunFacts) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in look(facts, LIMITS)]


def test_a_healthy_run_has_none() -> None:
    steps = [
        {"ratio": 1.001, "sample/dropped_stale_total": 3.0, "batch/samples_per_step": 64.0}
        for _ in range(30)
    ]
    fine = ReplicaFacts(name="r1", skew_s=0.2, loaded={9: "aa"}, effect=0.01, effect_version=9)
    facts = RunFacts(
        steps=steps,
        syncs=[sync(version, 0.5) for version in range(20)],
        replicas=[fine],
        announced={9: "aa"},
        tries_per_success=1.01,
    )
    assert look(facts, LIMITS) == []
    assert look(RunFacts(), LIMITS) == []


@pytest.mark.parametrize(("mean", "limit"), [(0.96, 0.97), (1.031, 1.03)])
def test_a_ratio_out_of_its_band_over_twenty_steps(mean: float, limit: float) -> None:
    steps = [{"ratio": 1.5}, *[{"ratio": mean}] * STEPS]
    (found,) = look(RunFacts(steps=steps), LIMITS)
    assert (found.kind, found.severity, found.limit) == ("ratio", "error", limit)
    assert found.value == pytest.approx(mean)
    assert f"{mean:.4f}" in found.sentence
    assert look(RunFacts(steps=steps[-STEPS + 1 :]), LIMITS) == []


def test_a_replica_that_serves_another_digest_than_announced() -> None:
    wrong = ReplicaFacts(name="r2", loaded={7: "bb", 8: "aa"})
    other = ReplicaFacts(name="r3", loaded={6: "whatever"})  # of a version nobody announces now
    facts = RunFacts(replicas=[wrong, other], announced={7: "aa", 8: "aa"})
    assert kinds(facts) == [("wrong-digest", "r2")]


def test_an_adapter_that_changes_nothing_counts_only_after_some_versions() -> None:
    def of(version: int, effect: float) -> list[tuple[str, str]]:
        replica = ReplicaFacts(name="r1", effect=effect, effect_version=version)
        return kinds(RunFacts(replicas=[replica]))

    assert of(LIMITS.no_effect_versions, 0.0) == [("no-effect", "r1")]
    assert of(LIMITS.no_effect_versions - 1, 0.0) == []
    assert of(LIMITS.no_effect_versions, 1e-6) == []


def test_stale_drops_count_against_what_was_trained() -> None:
    def of(dropped_a_step: float) -> list[tuple[str, str]]:
        steps = [
            {"sample/dropped_stale_total": 50 + dropped_a_step * n, "batch/samples_per_step": 64.0}
            for n in range(40)
        ]
        return kinds(RunFacts(steps=steps))

    assert of(15.0) == []
    assert of(17.0) == [("stale-drops", "")]


def sync(version: int, quorum_s: float, *, read_s: Sequence[float] = ()) -> SyncRow:
    replicas = [
        ReplicaSync(name=f"r{number}", ok=True, phases_s={"read": seconds})
        for number, seconds in enumerate(read_s)
    ]
    return SyncRow(
        version=version, adapter=f"v{version}", digest="", quorum_s=quorum_s, replicas=replicas
    )


def test_syncs_over_their_budget() -> None:
    slow, quick = sync(1, LIMITS.sync_p95_s + 1), sync(2, 1.0)
    assert kinds(RunFacts(syncs=[slow, *[quick] * 18])) == [("slow-sync", "")]
    assert kinds(RunFacts(syncs=[*[quick] * 20, slow])) == []
    assert kinds(RunFacts(syncs=[slow] * 4)) == []


def test_the_replica_whose_mount_is_slow() -> None:
    one = sync(1, 1.0, read_s=(0.1, LIMITS.mount_slow_s + 1))
    assert kinds(RunFacts(syncs=[one] * 5)) == [("slow-mount", "r1")]
    once = [sync(1, 1.0, read_s=(0.1, 0.1))] * 4
    assert kinds(RunFacts(syncs=[one, *once])) == []


def test_the_trainer_whose_mount_is_slow() -> None:
    row = SyncRow(version=1, adapter="v1", digest="", trainer_phases_s={"copy": 30.0})
    (found,) = look(RunFacts(syncs=[row] * 5), LIMITS)
    assert (found.kind, found.subject) == ("slow-mount", "")
    assert "The trainer took 30.0 s to write" in found.sentence


def test_slots_and_clocks() -> None:
    skewed = ReplicaFacts(name="r1", skew_s=-6.0)
    short = ReplicaFacts(name="r2", slots_fault="its engine.max_loras is 4")
    facts = RunFacts(replicas=[skewed, short])
    assert kinds(facts) == [("clock-skew", "r1"), ("slots-short", "r2")]
    assert "-6.0 s" in look(facts, LIMITS)[0].sentence


def test_tries_are_those_of_the_last_ten_minutes() -> None:
    tries = Tries()
    assert tries.read(100, 100, 0.0) is None  # what was before it looked first says nothing
    assert tries.read(100, 110, 10.0) is None
    assert tries.read(130, 200, 20.0) == pytest.approx(1.3)
    assert kinds(RunFacts(tries_per_success=1.3)) == [("retries", "")]
    assert tries.read(130, 400, 20.0 + WINDOW_S) == pytest.approx(1.0)


def finding(value: float) -> Finding:
    return Finding(kind="ratio", severity="error", sentence="", fix="", value=value)


def test_an_alert_stands_until_it_was_right_for_a_while() -> None:
    board = Board()
    raised, over = board.update([finding(1.1)], now_s=0.0, now_unix_s=1000.0)
    assert ([one.value for one in raised], over) == ([1.1], [])
    assert board.update([], now_s=CLEAR_AFTER_S - 1, now_unix_s=1029.0) == ([], [])
    assert board.update([finding(1.2)], now_s=CLEAR_AFTER_S, now_unix_s=1030.0) == ([], [])
    (alert,) = board.alerts
    assert (alert.value, alert.since_unix_s) == (1.2, 1000.0)
    raised, over = board.update([], now_s=2 * CLEAR_AFTER_S, now_unix_s=1060.0)
    assert (raised, over, board.alerts) == ([], [alert], [])


def test_a_class_of_replicas_that_is_off_although_the_mean_is_not() -> None:
    steps = [{"ratio": 1.0, "ratio/plain": 1.001, "ratio/fp8": 0.9}] * STEPS
    (found,) = look(RunFacts(steps=steps), LIMITS)
    assert (found.kind, found.severity, found.subject) == ("ratio", "warning", "fp8")
    assert found.value == pytest.approx(0.9)
    assert "class fp8 averaged 0.9000" in found.sentence
    assert look(RunFacts(steps=steps[1:]), LIMITS) == []
    assert kinds(RunFacts(steps=[*steps, {"ratio": 1.0}])) == [("ratio", "fp8")]  # none by it now
