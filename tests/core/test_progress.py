from asyncgrpo_agent.core import progress as p
from asyncgrpo_agent.core.progress import Progress


def fold(*records: dict[str, object]) -> Progress:
    run = Progress()
    for number, record in enumerate(records):
        run.add({"t": 100.0 + number, **record})
    return run


def test_a_run_from_its_records() -> None:
    run = fold(
        {"kind": "phase", "phase": "training"},
        {"kind": "replica", "name": "r1", "state": "READY", "reason": "engine is up"},
        {"kind": "sync", "version": 0, "seconds": 0.5, "report": {"acked": ["r1"]}},
        {"kind": "ack", "replica": "r1", "ok": True, "seconds": 0.2, "phases_s": {}},
        {"kind": "ack", "replica": "r1", "ok": False, "reason": "corrupt", "seconds": 0.1},
        {"kind": "metrics", "step": 1, "max_steps": 9, "values": {"reward": 0.5, "ratio": 1.0}},
        {"kind": "metrics", "step": 1, "max_steps": 9, "values": {"train_runtime": 3.0}},
        {"kind": "eval", "when": "after", "accuracy": 0.75, "samples": 300, "prompts": 75},
        {"kind": "unheard of"},
        {"kind": "ended", "ok": True, "reason": "training finished"},
    )
    assert run.started_unix_s == 100.0
    assert (run.phase, run.succeeded, run.max_steps) == ("done", True, 9)
    assert run.series(p.REWARD) == [0.5]
    assert run.series("no such metric") == []
    assert run.syncs[0].acked == ("r1",)
    assert run.replicas["r1"].acks_s == [0.2]
    assert run.replicas["r1"].refusals == 1
    assert run.evaluations["after"].accuracy == 0.75


def test_a_sync_without_a_report_counts_as_late() -> None:
    assert fold({"kind": "sync", "version": 0, "seconds": 35.0, "report": None}).syncs[0].timed_out


def test_quarter_means() -> None:
    assert p.quarter_means([1, 1, 2, 3, 4, 5, 6, 8]) == (1.0, 7.0)
    assert p.quarter_means([1, 2, 3]) == (0.0, 0.0)


def test_percentile() -> None:
    assert p.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert p.percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert p.percentile([], 0.5) == 0.0


def test_sparkline() -> None:
    assert p.sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert len(p.sparkline([0.1] * 100, 20)) == 20
    assert p.sparkline([], 20) == ""


def test_a_replica_without_an_agent_stays_marked() -> None:
    run = Progress()
    for state, more in (("JOINING", {"unverified": True}), ("GONE", {})):
        run.add({"t": 1.0, "kind": "replica", "name": "a", "state": state, "reason": "", **more})
    run.add({"t": 1.0, "kind": "replica", "name": "b", "state": "READY", "reason": ""})
    assert (run.replicas["a"].unverified, run.replicas["b"].unverified) == (True, False)
