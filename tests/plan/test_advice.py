from dataclasses import replace

import pytest

from asyncgrpo_agent.plan.advice import hints, limits, longest_phase, verdict
from asyncgrpo_agent.plan.figures import simulate
from asyncgrpo_agent.plan.inputs import Bucket, Inputs
from fakes.planned_fleets import SMALL


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (replace(SMALL, load=replace(SMALL.load, samples_per_s=1.0)), "trainer"),
        (replace(SMALL, load=replace(SMALL.load, in_flight=6)), "in_flight"),
        (replace(SMALL, spot_life_s=60.0, boot_s=60.0, simulate_s=300.0), "churn"),
        (replace(SMALL, proxy_rollouts_per_s=1.0), "proxy"),
        (replace(SMALL, sync_every_s=1.0, adapter_mb=1.0, max_staleness=1), "staleness"),
        (replace(SMALL, adapter_mb=400.0, sync_every_s=5.0), "sync:upload"),
        (replace(SMALL, bucket=Bucket(latency_s=0.5), simulate_s=300.0), "sync:requests"),
    ],
)
def test_what_holds_a_fleet_back_is_named_with_what_to_change(inputs: Inputs, name: str) -> None:
    found = simulate(inputs)
    assert name in [one.name for one in limits(found)]
    shares = [one.share for one in limits(found)]
    assert shares == sorted(shares, reverse=True)
    assert limits(found)[0].what in verdict(found)
    assert limits(found)[0].change in verdict(found)


def test_a_fleet_that_works_all_the_time_is_its_own_limit() -> None:
    found = simulate(SMALL)
    assert limits(found) == []
    assert "the replicas themselves" in verdict(found)


def test_what_costs_most_is_said_even_where_it_holds_nothing_back() -> None:
    dear = replace(SMALL.prices, egress_per_gb=1.0)
    assert any("leave the bucket" in said for said in hints(simulate(replace(SMALL, prices=dear))))
    free = replace(SMALL.prices, egress_per_gb=0.0)
    assert not any(
        "leave the bucket" in one for one in hints(simulate(replace(SMALL, prices=free)))
    )


def test_most_of_a_syncs_time_goes_into_one_phase() -> None:
    assert "upload" in longest_phase(simulate(replace(SMALL, adapter_mb=400.0)))
    late = Bucket(visible_after_s=5.0)
    assert "shows new files late" in longest_phase(simulate(replace(SMALL, bucket=late)))
