"""Eight runs whose bottleneck is known, as streams of what TRL logs."""

import random

import pytest

from asyncgrpo_agent.core.verdict import FleetFacts, judge

HEALTHY = FleetFacts(registered=4, ready=4)
LIMITS = {"queue_maxsize": 512, "max_inflight_tasks": 128}


def stream(
    *,
    step_s: float,
    wait_s: float = 0.0,
    sync_s: float = 0.3,
    queue: float = 40.0,
    in_flight: float = 60.0,
    backpressure_s: float | None = None,
    prefix: str = "",
) -> list[dict[str, float]]:
    """Thirty steps with a tenth of noise; `prefix` in the place of the group's name."""
    rng = random.Random(1)
    names = {
        "perf/step_s": step_s,
        "perf/rollout_wait_s": wait_s,
        "perf/weight_sync_s": sync_s,
        "sample/rollout_queue_size": queue,
        "rollout/inflight": in_flight,
    }
    if backpressure_s is not None:
        names["rollout/backpressure_s"] = backpressure_s
    if prefix:
        names = {f"{prefix}/{name.partition('/')[2]}": value for name, value in names.items()}
    return [
        {name: value * rng.uniform(0.9, 1.0) for name, value in names.items()} for _ in range(30)
    ]


RUNS = {
    # The five of a published tuning of this trainer: one replica; a mount that hides new adapters
    # for half a minute; more replicas behind a cap of rollouts in flight; the cap raised, until the
    # trainer is the slower side; the trainer made faster, until both keep up.
    "one replica": (
        stream(step_s=30, wait_s=20, queue=0.3, in_flight=128), LIMITS, HEALTHY, "generation-bound",
    ),
    "slow mount": (
        stream(step_s=45, wait_s=9, sync_s=30.8, queue=3), LIMITS, HEALTHY, "sync-bound",
    ),
    "pinned": (
        stream(step_s=14, wait_s=7, queue=1, in_flight=128), LIMITS, HEALTHY, "generation-bound",
    ),
    "full queue": (
        stream(step_s=8, queue=511, backpressure_s=3), LIMITS, HEALTHY, "trainer-bound",
    ),
    "tuned": (stream(step_s=7.5, wait_s=0.4, queue=180), LIMITS, HEALTHY, "balanced"),
    # And three of our own.
    "half the fleet lost": (
        stream(step_s=30, wait_s=20, queue=0.3), LIMITS,
        FleetFacts(registered=3, ready=2, suspect=1, gone=1), "degraded",
    ),
    "newer names": (
        stream(step_s=30, wait_s=20, queue=0.3, prefix="async"), LIMITS, HEALTHY,
        "generation-bound",
    ),
    "no limits told": (
        stream(step_s=8, queue=1000), {}, HEALTHY, "trainer-bound",
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_the_verdict_is_right_and_proves_itself(run: str) -> None:
    steps, limits, fleet, kind = RUNS[run]
    verdict = judge(steps, limits, fleet)
    assert verdict.kind == kind, verdict
    assert any(character.isdigit() for character in verdict.sentence)
    assert verdict.evidence
    assert verdict.advice or kind == "balanced"


def test_a_cap_that_is_reached_is_named() -> None:
    steps, limits, fleet, _ = RUNS["pinned"]
    verdict = judge(steps, limits, fleet)
    assert "All 128 rollouts" in verdict.sentence
    assert verdict.advice[0].startswith("Raise max_inflight_tasks")


def test_before_and_after() -> None:
    assert judge([], {}, FleetFacts(registered=2)).kind == "starting"
    assert judge([], {}, HEALTHY, finished="training finished").kind == "finished"
    assert judge(stream(step_s=1)[:2], LIMITS, HEALTHY).kind == "starting"


def test_one_of_many_that_is_lost_does_not_make_the_run_degraded() -> None:
    fleet = FleetFacts(registered=9, ready=9, gone=1)
    assert judge(stream(step_s=7.5, queue=180), LIMITS, fleet).kind == "balanced"
