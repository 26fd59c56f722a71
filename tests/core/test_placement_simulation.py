"""The router's figures for whole fleets, in virtual time. Run with -s to see them."""

import pytest

from asyncgrpo_agent.core.replicas import NEWCOMER_ROLLOUTS
from fakes.simulated_engines import CPU, GPU, Engine, Faults, Load
from fakes.simulated_fleet import Figures, SimulatedFleet, compare


def fleet(size: int, engine: Engine = GPU) -> dict[str, Engine]:
    return {f"r{number:03}": engine for number in range(size)}


def run(engines: dict[str, Engine], load: Load, faults: Faults | None = None) -> Figures:
    ours = SimulatedFleet(engines, load, faults=faults).run()
    print(ours)  # noqa: T201
    return checked(ours, load)


def checked(ours: Figures, load: Load) -> Figures:
    """What holds for every run."""
    assert ours.wrong_version == 0
    assert ours.open == 0
    assert ours.rollouts == load.steps * load.groups_per_step * load.group_size * load.turns
    return ours


@pytest.mark.parametrize(
    ("size", "load"),
    [
        (2, Load(in_flight=256, groups_per_step=64)),
        (8, Load(in_flight=1000, groups_per_step=256)),
    ],
)
def test_groups_share_a_replica_and_replicas_share_the_work(size: int, load: Load) -> None:
    figures = compare(fleet(size), load)
    for policy, found in figures.items():
        print(f"{policy:13} {found}")  # noqa: T201
    ours = checked(figures["by_router"], load)
    assert ours.affinity >= 0.86
    assert ours.spill <= 0.01
    assert ours.imbalance <= 0.10
    assert ours.p50 <= 1.05
    assert ours.p99 <= 1.4
    assert ours.p99 < figures["least_loaded"].p99
    assert ours.p99 < figures["at_random"].p99


def test_equal_machines_are_never_quite_equal() -> None:
    engines = {
        f"r{number}": Engine(token_s=0.01 * (0.97 + 0.01 * (number % 7))) for number in range(8)
    }
    ours = run(engines, Load(in_flight=1000, groups_per_step=256))
    assert ours.imbalance <= 0.10
    assert ours.affinity >= 0.86


def test_small_groups_of_work_on_many_replicas() -> None:
    ours = run(fleet(8), Load(in_flight=128, groups_per_step=16, steps=12))
    assert ours.affinity >= 0.86
    assert ours.spill <= 0.01
    assert ours.p99 <= 1.5


def test_a_large_fleet() -> None:
    ours = run(fleet(100), Load(in_flight=2000, groups_per_step=300, steps=2))
    assert ours.affinity >= 0.86
    assert ours.spill <= 0.01
    assert ours.p99 <= 1.5


@pytest.mark.slow
def test_a_very_large_fleet() -> None:
    ours = run(fleet(500), Load(in_flight=8000, groups_per_step=1500, steps=2))
    assert ours.affinity >= 0.86
    assert ours.spill <= 0.01
    assert ours.p99 <= 1.5


def test_a_replica_of_a_tenth_of_the_speed_gets_a_tenth_of_the_work() -> None:
    engines = {**fleet(4), "slow": Engine(token_s=0.1, crowd_s=0.001)}
    ours = run(engines, Load(in_flight=256, groups_per_step=128, steps=8))
    assert 0.5 / 41 <= ours.requests["slow"] / ours.rollouts <= 1.5 / 41
    assert ours.p99 <= 1.5, "nobody waits for it"


def test_a_cpu_next_to_gpus_holds_nobody_up() -> None:
    engines = {**fleet(2), "cpu": CPU}
    load = Load(in_flight=128, steps=8)
    ours = run(engines, load)
    assert ours.requests["cpu"] <= load.in_flight, "what it got before it was known"
    assert ours.p99 <= 1.5


def test_a_newcomer_is_neither_flooded_nor_starved() -> None:
    load = Load(in_flight=512, groups_per_step=128, steps=8)
    faults = Faults(joins=((30.0, "new", GPU),))
    ours = run(fleet(4), load, faults)
    assert ours.p99 <= 1.6
    assert ours.peak_at_first["new"] <= NEWCOMER_ROLLOUTS + load.group_size
    assert 0.15 <= ours.lately["new"] <= 0.25, "a fifth is its fair share"


def test_replicas_come_and_go_and_no_rollout_is_lost() -> None:
    faults = Faults(
        leaves=tuple((20.0 + 10 * n, f"r{n:03}") for n in range(4)),
        joins=tuple((25.0 + 10 * n, f"new{n}", GPU) for n in range(4)),
    )
    ours = run(fleet(6), Load(in_flight=384, groups_per_step=128), faults)
    assert ours.affinity >= 0.75
    assert ours.retried <= 4 * 2 * 384 / 6


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_replica_that_fails_at_once_draws_no_traffic_and_comes_back(share: float) -> None:
    faults = Faults(fails_at_once=frozenset({"r001"}), from_s=20.0, until_s=50.0, share=share)
    ours = run(fleet(4), Load(in_flight=256, steps=8), faults)
    assert ours.failures["r001"] <= 30
    assert ours.affinity >= 0.86
    assert ours.lately["r001"] >= 0.15, "it works again, and gets its share"


def test_later_turns_follow_their_prefix() -> None:
    ours = run(fleet(4), Load(in_flight=256, turns=3, groups_per_step=32))
    assert ours.affinity >= 0.86
    assert ours.imbalance <= 0.10


def test_the_same_events_give_the_same_choices() -> None:
    load = Load(steps=2, groups_per_step=32)
    assert SimulatedFleet(fleet(4), load).run() == SimulatedFleet(fleet(4), load).run()
