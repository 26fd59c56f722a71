from __future__ import annotations

from asyncgrpo_agent.report.run import Run
from fakes.histories import REPLICAS, simulated


def folded(steps: int = 300, *, resume_at: int | None = 180) -> Run:
    run = Run()
    run.add_all(simulated(steps, resume_at=resume_at))
    return run


def test_attempts_say_where_they_began_and_how_they_ended() -> None:
    run = folded()
    first, second = run.attempts
    assert (first.host, first.first_step, first.last_step, first.ended) == ("trainer-1", 0, 185, "")
    assert (second.first_step, second.last_step, second.source) == (180, 300, "bucket")
    assert (second.host, second.ended) == ("trainer-2", "training finished")
    assert run.resumed_at == [180]
    assert (run.name, run.story.step) == ("demo", 300)


def test_replicas_say_how_often_they_were_lost() -> None:
    run = folded(160, resume_at=None)
    assert sorted(run.replicas) == list(REPLICAS)
    lost = run.replicas["r3"]
    assert (lost.joined, lost.lost, lost.last_reason) == (2, 1, "its link ended")
    steady = run.replicas["r1"]
    assert (steady.joined, steady.lost, steady.syncs) == (1, 0, 160)
    away_s = 40 * 6.2
    assert abs(steady.ready_s - lost.ready_s - away_s) < 10


def test_one_loss_is_counted_once_and_a_drain_is_none() -> None:
    run = Run()
    states = ["READY", "SUSPECT", "GONE", "READY", "DRAINING", "GONE"]
    for at, state in enumerate(states):
        run.add({"t": at + 1.0, "kind": "replica", "name": "r1", "state": state, "reason": "x"})
    assert (run.replicas["r1"].joined, run.replicas["r1"].lost) == (2, 1)


def test_nonsense_is_passed_by() -> None:
    run = Run()
    run.add_all(
        [
            {},
            {"t": "x", "kind": "metrics"},
            {"t": 1.0, "kind": "ack", "replica": "r"},
            {"t": 2.0, "kind": "totals", "replicas": 3},
            {"t": 3.0, "kind": "phase", "phase": "training"},
        ]
    )
    assert run.records == 1
