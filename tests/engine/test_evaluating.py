"""Evaluations beside training: when they begin, what becomes of their results."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("transformers")

from asyncgrpo_engine.evaluating import BESIDE_TRAINING, Evaluations  # noqa: E402
from asyncgrpo_engine.evaluation import EvaluationError, Result  # noqa: E402


@dataclass(frozen=True)
class Sampler:
    """In the place of `Evaluation`: ends when it is let go."""

    free: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, int]] = field(default_factory=list)
    concurrency: int = 16
    is_low: bool = False

    def run(self, name: str) -> Result:
        self.asked.append((name, self.concurrency))
        assert self.is_low == (self.concurrency == BESIDE_TRAINING)
        assert self.free.wait(10)
        if name.endswith("v6"):
            raise EvaluationError("the server has gone")
        return Result(accuracy=0.5, samples=4, prompts=2)


class Trainer:
    """What of TRL's trainer is looked at."""

    def __init__(self) -> None:
        self.model_version = 0
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(weight_sync_steps=1)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}


@dataclass
class World:
    sampler: Sampler = field(default_factory=Sampler)
    trainer: Trainer = field(default_factory=Trainer)
    told: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        events: Any = SimpleNamespace(
            evaluation=lambda when, **fields: self.told.append({"when": when, **fields}),
            phase=lambda _phase: None,
        )
        sampler: Any = self.sampler
        self.evaluations = Evaluations(sampler, events, every_steps=5)
        self.callback: Any = self.evaluations.callback()
        self.callback.watch(self.trainer)

    def step(self, number: int) -> None:
        """The step after `number`, whose policy is published when it begins."""
        self.trainer.state.global_step = self.trainer.model_version = number
        self.callback.on_step_begin(None, self.trainer.state, None)
        self.trainer.state.global_step = number + 1
        self.callback.on_step_end(None, self.trainer.state, None)


def test_every_few_steps_of_a_named_version_and_logged_with_the_rest() -> None:
    world = World()
    world.callback.on_train_begin(None, world.trainer.state, None)
    world.sampler.free.set()
    for number in range(11):
        world.step(number)
        world.evaluations.wait()
    world.step(11)
    assert world.sampler.asked == [
        ("trl-policy-v5", BESIDE_TRAINING),
        ("trl-policy-v10", BESIDE_TRAINING),
    ]
    assert [(found["when"], found["step"]) for found in world.told] == [
        ("during", 5),
        ("during", 10),
    ]
    assert world.trainer._metrics["train"]["eval/accuracy"] == [0.5, 0.5]
    assert world.trainer._metrics["train"]["eval/step"] == [5.0, 10.0]


def test_a_step_that_training_goes_on_from_is_not_evaluated() -> None:
    world = World()
    world.trainer.state.global_step = 5
    world.callback.on_train_begin(None, world.trainer.state, None)
    world.step(5)
    assert world.sampler.asked == []


def test_a_result_is_of_the_step_whose_policy_was_asked() -> None:
    world = World()
    world.sampler.free.set()
    world.trainer.args.weight_sync_steps = 3
    world.step(5)
    world.evaluations.wait()
    assert [found["step"] for found in world.told] == [3]


def test_one_at_a_time() -> None:
    world = World()
    world.step(5)
    world.step(10)
    world.sampler.free.set()
    world.evaluations.wait()
    assert [name for name, _ in world.sampler.asked] == ["trl-policy-v5"]


def test_one_that_fails_costs_training_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.sampler.free.set()
    world.evaluations.begin("trl-policy-v6", 6)
    world.evaluations.wait()
    assert "evaluation at step 6 failed: the server has gone" in capsys.readouterr().out
    world.step(7)
    assert world.trainer._metrics["train"] == {}


def test_the_last_one_waits_for_the_one_before() -> None:
    world = World()
    world.step(5)
    world.sampler.free.set()
    world.trainer.state.global_step = world.trainer.model_version = 9
    world.evaluations.after(world.trainer)
    assert [(found["when"], found["name"]) for found in world.told] == [
        ("during", "trl-policy-v5"),
        ("after", "trl-policy-v9"),
    ]
