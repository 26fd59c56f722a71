"""What a run is made with."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo_engine import setup


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCGRPO_ROLLOUT_SEED", "")


def drawn() -> int:
    setup.seed_this_process()
    return random.getrandbits(63)


def test_rollouts_follow_from_the_seed_and_the_step_that_they_begin_at() -> None:
    state = random.getstate()
    assert drawn() != drawn()
    assert setup.seed_rollouts(42, 0) == "42-0" == os.environ["ASYNCGRPO_ROLLOUT_SEED"]
    first = drawn()
    assert first == drawn()
    setup.seed_rollouts(42, 8)
    assert first != drawn()
    random.setstate(state)


def test_one_line_a_fact() -> None:
    facts = {"versions": {"trl": "1.16.0", "peft": "0.9"}, "attention": "sdpa (no GPU)"}
    assert setup.lines(facts) == ["versions: trl=1.16.0 peft=0.9", "attention: sdpa (no GPU)"]


def test_facts_of_a_start() -> None:
    args: Any = SimpleNamespace(seed=7, data_seed=None)
    found = setup.facts(args, attention="sdpa (no GPU)", begins_with="", first_step=4)
    assert found["begins_with"] == "a new adapter"
    assert found["seeds"] == {"train": 7, "data": 7, "rollouts": "7-4", "eval": "none"}
    args.data_seed = 8
    found = setup.facts(args, attention="", begins_with="", first_step=0, eval_samples=3)
    assert (found["seeds"]["data"], found["seeds"]["eval"]) == (8, "0..2")
