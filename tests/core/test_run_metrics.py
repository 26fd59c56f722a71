from __future__ import annotations

from typing import Any

from asyncgrpo_agent.core.metric_model import Sample
from asyncgrpo_agent.core.run_metrics import RunFacts, run_samples

ROW = {"name": "demo", "state": "running", "step": 7, "max_steps": None, "cost": 0.0}
ROUTING = {"retried": 1, "duplicates": 0, "delayed": 0, "refused": 0, "waiting": 2}


def snapshot(**changes: Any) -> dict[str, Any]:
    return {
        "run": ROW | {"replica_hours": 0.5},
        "verdict": {"kind": "balanced"},
        "facts": {"queue_maxsize": True},  # TRL's settings may be anything
        "alerts": [],
        "replicas": [],
        "routing": ROUTING | {"shares": {}, "oldest_wait_s": 3.0, "held_s": 9.0},
    } | changes


def samples(facts: RunFacts) -> dict[tuple[str, tuple[str, ...]], Sample]:
    return {(one.family.name, one.labels): one for one in run_samples(facts)}


def test_alerts_count_by_kind_and_severity() -> None:
    alerts = [{"kind": "ratio", "severity": "warning", "subject": one} for one in ("a", "b")]
    alerts += [{"kind": "digest", "severity": "error", "subject": "r1"}]
    found = samples(RunFacts(snapshot=snapshot(alerts=alerts)))
    assert found["run_alerts", ("demo", "ratio", "warning")].value == 2
    assert found["run_alerts", ("demo", "digest", "error")].value == 1


def test_metrics_of_both_generations_of_trl_have_one_name() -> None:
    for queue in ("sample/rollout_queue_size", "rollout/rollout_queue_size"):
        found = samples(RunFacts(snapshot=snapshot(), newest={queue: 12.0, "reward": 0.5}))
        assert found["train_queue_rollouts", ("demo",)].value == 12.0
        assert found["train_reward", ("demo",)].value == 0.5


def test_what_is_not_known_is_left_out_and_hours_are_seconds() -> None:
    found = samples(RunFacts(snapshot=snapshot()))
    names = {name for name, _ in found}
    assert not names & {"run_max_steps", "train_reward", "train_queue_limit_rollouts"}
    assert found["run_replica_seconds", ("demo",)].value == 1800.0
    held = [labels for (name, labels), one in found.items() if name == "run_verdict" and one.value]
    assert held == [("demo", "balanced")]


def test_the_ratio_of_each_class_of_replicas() -> None:
    newest = {"ratio": 1.0, "ratio/plain": 1.001, "ratio/fp8": 0.95}
    found = samples(RunFacts(snapshot=snapshot(), newest=newest))
    assert found["train_importance_ratio", ("demo",)].value == 1.0
    assert found["train_class_importance_ratio", ("demo", "fp8")].value == 0.95
    assert found["train_class_importance_ratio", ("demo", "plain")].value == 1.001
