"""A plan's figures, next to what was measured with whole agents on this project's machine."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings

from asyncgrpo_agent.plan.figures import Figures, simulate
from asyncgrpo_agent.plan.inputs import Bucket, Engine, Inputs, Load, Prices
from fakes.planned_fleets import SMALL, fleets

# `scripts/bench sync` on 2 shared cores: a FUSE mount answers in about a millisecond, copies go
# through it at 80 to 150 MB/s while hashes and engines take their share, and a load takes 10 ms.
BENCHED = Inputs(
    replicas=2,
    adapter_mb=4.0,
    sync_every_s=5.0,
    rtt_s=0.002,
    hash_mb_per_s=1000.0,
    bucket=Bucket(latency_s=0.001, host_mb_per_s=110.0),
    engine=Engine(slots=8, tokens_per_s=320.0, tokens_per_s_alone=40.0, load_s=0.014),
    load=Load(completion_tokens=100.0, max_tokens=400),
)


@settings(max_examples=15)
@given(fleets)
def test_shares_add_up_and_nothing_is_below_zero(inputs: Inputs) -> None:
    found = simulate(inputs)
    shares = found.shares
    parts = (shares.used, shares.starting, shares.waiting, shares.trainer, shares.cap)
    assert all(part >= -1e-9 for part in (*parts, shares.uneven, shares.stale))
    assert sum(parts) + shares.uneven == pytest.approx(1.0)
    assert shares.stale <= shares.used
    assert found.dollars.total >= inputs.replicas * inputs.prices.replica_per_h
    assert min(found.requests.put, found.requests.list, found.requests.get) >= 0
    assert found.sync.call_p50_s <= found.sync.call_p95_s
    assert found.proxies >= 1


def test_the_sync_takes_as_long_as_it_was_measured_to_take() -> None:
    strict = simulate(BENCHED).sync
    assert strict.call_p50_s == pytest.approx(0.122, rel=0.25)
    assert strict.all_p50_s == pytest.approx(0.126, rel=0.25)
    late = replace(BENCHED.bucket, visible_after_s=2.5)
    hf_like = simulate(replace(BENCHED, bucket=late, sync_every_s=10.0)).sync
    assert hf_like.call_p50_s == pytest.approx(2.61, rel=0.05)


def test_more_latency_bytes_and_replicas_cost_more() -> None:
    def sync_s(found: Figures) -> float:
        return found.sync.call_p50_s

    plain = simulate(SMALL)
    assert sync_s(simulate(replace(SMALL, bucket=Bucket(latency_s=0.3)))) > 2 * sync_s(plain)
    assert sync_s(simulate(replace(SMALL, adapter_mb=400.0))) > 3 * sync_s(plain)
    more = simulate(replace(SMALL, replicas=12))
    assert more.requests.get == pytest.approx(4 * plain.requests.get, rel=0.1)
    assert more.requests.egress_gb == pytest.approx(4 * plain.requests.egress_gb, rel=0.1)
    assert more.rollouts_per_s == pytest.approx(4 * plain.rollouts_per_s, rel=0.1)


def test_prices_are_a_price_lists() -> None:
    prices = Prices(
        put_list_per_1000=5.0,
        get_head_per_1000=1.0,
        egress_per_gb=2.0,
        replica_per_h=3.0,
        fixed_per_h=4.0,
    )
    found = simulate(replace(SMALL, prices=prices))
    asked = found.requests
    assert found.dollars.requests == pytest.approx(asked.put_list / 200 + asked.get_head / 1000)
    assert found.dollars.egress == pytest.approx(2 * asked.egress_gb)
    assert (found.dollars.replicas, found.dollars.fixed) == (9.0, 4.0)
    per_h = 3600 / found.simulated_s * 3 * found.sync.syncs * 0.04
    assert asked.egress_gb == pytest.approx(per_h, rel=0.35)


def test_a_part_of_the_fleet_stands_for_the_whole() -> None:
    whole = simulate(replace(SMALL, replicas=24, placed_replicas=24))
    part = simulate(replace(SMALL, replicas=24, placed_replicas=6))
    assert part.rollouts_per_s == pytest.approx(whole.rollouts_per_s, rel=0.1)
    assert part.shares.idle == pytest.approx(whole.shares.idle, abs=0.05)


@pytest.mark.slow
def test_five_hundred_replicas_take_seconds() -> None:
    began = time.process_time()
    found = simulate(Inputs(replicas=500, spot_life_s=4 * 3600.0, simulate_s=150.0))
    assert time.process_time() - began < 30
    assert found.sync.syncs >= 4
    assert found.shares.used > 0.9
    assert found.proxies == 2
