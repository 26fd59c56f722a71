from __future__ import annotations

from typing import Any

from asyncgrpo_agent.core.trainer_metrics import TrainerCounts, TrainerFacts, trainer_samples


def values(counts: TrainerCounts, facts: TrainerFacts | None = None) -> dict[Any, Any]:
    samples = trainer_samples("demo", counts, facts or TrainerFacts())
    return {(one.family.name, *one.labels[1:]): one.value for one in samples}


def test_what_is_recorded_is_counted() -> None:
    counts = TrainerCounts()
    counts.add("started", {"max_steps": 50}, 1.0)
    counts.add("phase", {"phase": "training"}, 2.0)
    sync = {"bytes": 100, "seconds": 2.0, "report": {"timed_out": False}}
    counts.add("sync", sync, 3.0)
    counts.add("sync", sync | {"report": None}, 4.0)  # the proxy went away
    counts.add("checkpoint", {"step": 10, "seconds": 1.5}, 5.0)
    counts.add("metrics", {"max_steps": 50, "values": {"sample/staleness_mean": 1.5}}, 6.0)
    counts.answer(ok=True)
    counts.answer(ok=False)
    found = values(counts)
    assert found["trainer_max_steps",] == 50
    assert [found["trainer_phase", one] for one in ("training", "saving", "other")] == [1, 0, 0]
    assert found["trainer_syncs", "reached"] == found["trainer_syncs", "timed_out"] == 1
    assert found["trainer_sync_bytes",] == 200
    assert found["trainer_checkpoint_mirrored_timestamp_seconds",] == 5.0
    assert found["trainer_staleness_versions",] == 1.5
    assert found["trainer_rollouts", "failed"] == 1


def test_words_of_a_users_own_program_are_bounded_and_what_makes_no_sense_is_skipped() -> None:
    counts = TrainerCounts()
    counts.add("phase", {"phase": "dreaming"}, 1.0)
    counts.add("metrics", {"values": "none"}, 2.0)
    counts.add("checkpoint", {"step": None}, 3.0)
    found = values(counts)
    assert found["trainer_phase", "other"] == 1
    assert ("trainer_checkpoint_mirrored_step",) not in found


def test_a_trainer_says_why_it_is_not_ready_without_names() -> None:
    assert len(TrainerFacts().unready()) == 3
    well = TrainerFacts(is_linked=True, ready_replicas=1, is_training=True)
    assert well.unready() == []
    held_up = TrainerFacts(
        is_linked=True, ready_replicas=1, is_training=True, is_bucket_failing=True
    )
    assert held_up.unready() == ["an adapter cannot be written to the bucket"]
