from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.checkpoints import CheckpointKey
from asyncgrpo_agent.core.resumption import (
    OnThisHost,
    candidates,
    changes,
    is_finished,
    settings,
)


def key(attempt: int, step: int, retry: int = 0) -> CheckpointKey:
    return CheckpointKey(attempt, step, retry, f"a{attempt:04d}-0000")


def test_a_later_attempt_goes_before_a_higher_step() -> None:
    listed = {"a0001-0000": [key(1, 50), key(1, 100)], "a0002-0000": [key(2, 60)]}
    assert candidates(None, listed) == [key(2, 60), key(1, 100), key(1, 50)]
    stray = OnThisHost(step=120, attempt_number=1)
    assert candidates(stray, listed)[:2] == [key(2, 60), stray]


def test_what_is_on_this_host_need_not_be_copied() -> None:
    here = OnThisHost(step=100, attempt_number=1)
    assert candidates(here, {"a": [key(1, 100), key(1, 100, 1)]}) == [
        here,
        key(1, 100, 1),
        key(1, 100),
    ]
    assert candidates(OnThisHost(step=90, attempt_number=1), {"a": [key(1, 100)]})[0] == key(1, 100)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9))),
    st.none() | st.tuples(st.integers(0, 4), st.integers(0, 9)),
)
def test_all_are_candidates_and_the_first_is_the_newest(
    bucket: list[tuple[int, int]], host: tuple[int, int] | None
) -> None:
    local = None if host is None else OnThisHost(attempt_number=host[0], step=host[1])
    found = candidates(local, {"x": [key(*one) for one in bucket]})
    assert len(found) == len(bucket) + (local is not None)
    ranks = [(one.attempt_number, one.step) for one in found]
    assert ranks == sorted(ranks, reverse=True)


def test_changes_are_listed_and_the_adapters_shape_has_to_stay() -> None:
    before = settings(
        task={"dataset": "a.jsonl", "rewards": ["m:f"], "tools": []},
        passthrough={"max_steps": 10, "hub_token": "secret"},
        lora={"r": 8, "lora_dropout": 0.0},
    )
    now = settings(
        task={"dataset": "a.jsonl", "rewards": ["m:f"], "tools": []},
        passthrough={"max_steps": 20, "beta": 0.1},
        lora={"r": 16, "lora_dropout": 0.1},
    )
    assert "secret" not in str(before)
    found = changes(before, now)
    assert [str(change) for change in found if change.fits] == [
        "train.beta: unset -> 0.1",
        "train.lora.lora_dropout: 0.0 -> 0.1",
        "train.max_steps: 10 -> 20",
    ]
    assert [str(change) for change in found if not change.fits] == ["train.lora.r: 8 -> 16"]
    assert changes({}, now) == []


def test_a_run_has_ended_when_its_steps_are_done() -> None:
    assert is_finished(10, {"max_steps": 10})
    assert not is_finished(10, {"max_steps": 11})
    assert not is_finished(10, {"max_steps": -1, "num_train_epochs": 1})
    assert not is_finished(10, {})
