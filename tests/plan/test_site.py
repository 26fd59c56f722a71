"""Whole runs in virtual time: what holds for every fleet."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from asyncgrpo_agent.plan.inputs import Bucket, Inputs
from asyncgrpo_agent.plan.site import Site
from fakes.planned_fleets import SMALL, fleets


def played(**changes: Any) -> Site:
    site = Site(replace(SMALL, **changes))
    site.run()
    return site


@settings(max_examples=25)
@given(fleets)
def test_what_holds_for_every_fleet(inputs: Inputs) -> None:
    site = Site(inputs)
    site.run()
    rollouts = site.rollouts
    open_ = sum(len(box.running) for box in rollouts.boxes.values())
    assert open_ == sum(box.replica.in_flight for box in rollouts.boxes.values())
    assert open_ == sum(counts.total() for counts in rollouts.in_use.values())
    assert open_ <= inputs.placed_in_flight
    for box in rollouts.boxes.values():
        assert len(box.running) <= inputs.engine.slots
        assert {rollout.demand.model for _, _, rollout in box.running} <= box.replica.loaded
    for loader in site.loaders.values():
        assert len(loader.loaded) <= inputs.max_loras
        assert len(set(loader.loaded)) == len(loader.loaded)
    for one in site.published[:-1]:
        assert 0 < one.written_s <= one.called_s
        assert one.called_s <= one.written_s + inputs.sync_timeout_s + 2 * inputs.rtt_s
        for at in one.phases:
            assert at.announced <= at.visible <= at.staged <= at.loaded
    began = [one.began for one in site.published]
    assert all(b - a >= inputs.sync_every_s - 1e-6 for a, b in pairwise(began))


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (played(spot_life_s=30.0, boot_s=10.0, seed=7) for _ in range(2))
    assert first.rollouts.total() == second.rollouts.total()
    assert first.s3.asked == second.s3.asked
    assert [one.called_s for one in first.published] == [one.called_s for one in second.published]
    other = played(spot_life_s=30.0, boot_s=10.0, seed=8)
    assert other.rollouts.total() != first.rollouts.total()


def test_a_sync_ends_with_its_quorum_and_not_with_the_last_replica() -> None:
    site = played(replicas=20, bucket=Bucket(latency_s=0.2))
    for one in site.measured:
        acked = sorted(one.sync.acked.values())
        assert len(acked) == 20
        assert one.written_s + acked[9] <= one.called_s < one.began + (one.all_s or 0.0)


def test_replicas_that_are_slower_than_the_trainer_skip_versions_and_serve_all_the_same() -> None:
    site = played(adapter_mb=1000.0, sync_every_s=10.0, simulate_s=200.0, quorum=0.0)
    loaded = {name for loader in site.loaders.values() for name in loader.loaded}
    assert loaded
    assert site.rollouts.total().rollouts > 0
    assert any(one.sync.missing for one in site.published[:-1])


def test_a_sync_that_gets_no_answer_ends_by_its_timeout() -> None:
    site = played(bucket=Bucket(visible_after_s=1000.0), sync_timeout_s=5.0, sync_every_s=10.0)
    assert all(one.timed_out for one in site.measured)
    assert all(5.0 < one.called_s < 10.0 for one in site.measured)


def test_a_bucket_that_shows_files_late_is_looked_at_again_and_again() -> None:
    late = played(bucket=Bucket(visible_after_s=2.5))
    at_once = played()
    wait_s = late.measured[0].called_s - at_once.measured[0].called_s
    assert 2.3 < wait_s < 3.2
    assert late.s3.asked.list > 2 * at_once.s3.asked.list


def test_replicas_that_are_taken_away_lose_no_rollout() -> None:
    site = played(replicas=6, spot_life_s=40.0, boot_s=10.0, simulate_s=300.0)
    sums = site.rollouts.total()
    assert site.lost > 10
    assert sums.retried > 0
    assert sums.placed >= sums.rollouts
    assert 0.5 < sums.up / sums.ticks < 0.95, "a fifth of the time they boot"


def test_a_trainer_that_has_enough_holds_rollouts_back() -> None:
    free = played()
    slow = played(load=replace(SMALL.load, samples_per_s=1.0))
    sums = slow.rollouts.total()
    assert sums.full_ticks > sums.ticks / 2
    assert sums.rollouts < 0.5 * free.rollouts.total().rollouts
    assert sums.rollouts == pytest.approx(slow.measured_s, rel=0.4)


def test_samples_grow_stale_where_syncs_outrun_rollouts() -> None:
    site = played(sync_every_s=1.0, adapter_mb=1.0, max_staleness=1)
    sums = site.rollouts.total()
    assert sums.stale > 0.3 * sums.rollouts
