from dataclasses import dataclass, field

import pytest

from asyncgrpo_agent.core.speeds import SpeedLine, SpeedMeter, weigh


@dataclass
class Measured:
    meter: SpeedMeter = field(default_factory=SpeedMeter)
    health: float = 1.0
    speed: float = 1.0
    seed_tokens_per_s: float = 0.0


def line_of(token_s: float, crowd_s: float, *concurrency: float) -> SpeedLine:
    line = SpeedLine()
    for count in concurrency:
        line.add(count, token_s + crowd_s * count)
    return line


def measured(token_s: float, crowd_s: float, *concurrency: float) -> Measured:
    return Measured(meter=SpeedMeter(line=line_of(token_s, crowd_s, *concurrency)))


def test_a_line_seen_at_several_concurrencies_knows_the_others() -> None:
    line = line_of(0.01, 0.001, *range(1, 41))
    assert line.tokens_per_s(100) == pytest.approx(100 / 0.11, rel=0.1)
    assert line.tokens_per_s(5) == pytest.approx(5 / 0.015, rel=0.25)


def test_a_line_seen_at_one_concurrency_is_flat() -> None:
    line = line_of(0.01, 0.001, 4, 4, 4)
    assert line.tokens_per_s(40) == pytest.approx(40 / 0.014)


def test_a_meter_counts_only_while_rollouts_run() -> None:
    meter = SpeedMeter()
    meter.run(0, 100.0)
    meter.run(4, 102.0)  # four for two seconds
    meter.run(0, 160.0)
    meter.made(400)
    assert (meter.line.concurrency, meter.line.token_s) == (4.0, 8 / 400)


def test_few_tokens_are_no_sample_and_a_new_engine_starts_anew() -> None:
    meter = SpeedMeter()
    meter.run(1, 1.0)
    meter.made(10)
    assert meter.line.weight == 0
    meter.made(-5)
    meter.run(1, 2.0)
    meter.made(100)
    assert meter.line.token_s == 0.01


def test_of_equal_engines_the_one_with_less_work_never_looks_slower() -> None:
    busy, idle = measured(0.01, 0.0001, 60, 80, 70), measured(0.01, 0.0001, 6, 8, 7)
    weigh([busy, idle])
    assert busy.speed <= idle.speed <= 1.4 * busy.speed


def test_a_cpu_next_to_a_gpu_is_seen_as_such() -> None:
    gpu, cpu = measured(0.01, 0.0001, 50, 60, 70), measured(0.1, 0.1, 1, 2, 4, 8)
    weigh([gpu, cpu])
    assert gpu.speed > 50 * cpu.speed


def test_the_unknown_counts_as_the_median_and_failures_slow_down() -> None:
    fleet = [measured(token_s, 0.0, 10) for token_s in (0.01, 0.02, 0.04)]
    unknown, failing = Measured(), Measured(health=0.25)
    weigh([*fleet, unknown, failing])
    assert unknown.speed == fleet[1].speed
    assert failing.speed == unknown.speed / 4


def test_a_fleet_that_nobody_has_measured_is_equal() -> None:
    fleet = [Measured(), Measured()]
    weigh(fleet)
    assert [replica.speed for replica in fleet] == [1.0, 1.0]


def test_a_replica_that_slows_down_is_noticed() -> None:
    line = line_of(0.01, 0.0, *[10] * 30)
    for _ in range(30):
        line.add(10, 0.1)
    assert line.tokens_per_s(10) == pytest.approx(10 / 0.1, rel=0.05)


def seeded(tokens_per_s: float) -> Measured:
    return Measured(seed_tokens_per_s=tokens_per_s)


def test_newcomers_are_compared_by_the_rollout_that_found_them_ready() -> None:
    fast, slow, unknown = seeded(100), seeded(10), Measured()
    weigh([fast, slow, unknown])
    assert (fast.speed, slow.speed, unknown.speed) == (100, 10, 55)


def test_a_newcomer_is_judged_by_its_seed_in_proportion_to_the_others() -> None:
    old, new = measured(0.01, 0.0, 8, 8), seeded(10)
    old.seed_tokens_per_s = 100
    weigh([old, new])
    assert new.speed == pytest.approx(old.speed / 10)
