"""Reward functions by name, weighted and watched, scored as TRL scores them."""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_engine import named, rewards
from asyncgrpo_engine.rewards import RewardError, Scored

SOURCE = """
import math
class Half:
    def __call__(self, completions, **columns): return [0.5 for _ in completions]
def one(completions, **columns): return [1 for _ in completions]
async def later(completions, **columns): return [2 for _ in completions]
half = Half()
def raises(completions, answer, **columns):
    return [answer["gold"] for _ in completions]
def none(completions, **columns): pass
def short(completions, **columns): return [1.0]
def nan(completions, **columns): return [1.0, math.nan]
def words(completions, **columns): return [1.0, "good"]
def some(completions, **columns): return [None, 0.5]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_rewards.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    named.extend_path([str(tmp_path)])
    monkeypatch.delitem(sys.modules, "some_rewards", raising=False)


def load(*names: str, weights: tuple[float, ...] = ()) -> list[Scored]:
    functions, problems = rewards.load([f"some_rewards:{name}" for name in names], weights)
    assert problems == []
    return functions


def test_functions_objects_and_coroutines_with_weights() -> None:
    one, half, later = load("one", "half", "later", weights=(1, 4, 0.5))
    assert [found.__name__ for found in (one, half, later)] == ["one", "half", "later"]
    assert one(completions=["a", "b"]) == [1.0, 1.0]
    assert half(completions=["a"]) == [2.0]
    assert half.unweighted()(completions=["a"]) == [0.5]
    assert asyncio.run(later(completions=["a", "b"])) == [1.0, 1.0]  # type: ignore[arg-type]


def test_they_reach_another_process() -> None:
    for found in load("one", "half", "later", weights=(1, 2, 3)):
        again = pickle.loads(pickle.dumps(found))
        assert (again.name, again.weight, type(again)) == (found.name, found.weight, type(found))


def test_an_answer_may_have_no_score() -> None:
    (some,) = load("some", weights=(2.0,))
    assert some(completions=["a", "b"]) == [None, 1.0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", "raised TypeError: string indices must"),
        ("none", "returned None; return a list with a number, or None, for each answer"),
        ("short", "returned 1 values for 2 answers; return a list"),
        ("nan", "returned nan for answer 1; return None for an answer without a score"),
        ("words", "returned 'good' for answer 1; return a list"),
    ],
)
def test_what_cannot_be_trained_on(tmp_path: Path, name: str, what: str) -> None:
    """The message names function and file."""
    (found,) = load(name)
    with pytest.raises(RewardError) as caught:
        found(completions=["a", "b"], answer="7")
    assert what in str(caught.value)
    assert f"some_rewards:{name}" in str(caught.value)
    assert f"{tmp_path / 'some_rewards.py'}, line " in str(caught.value)


def test_classes_are_no_rewards() -> None:
    _, (problem,) = rewards.load(["some_rewards:Half"])
    assert problem.what == "a class, no reward"


def test_none_at_all() -> None:
    _, (problem,) = rewards.load([])
    assert problem.what == "no reward function"
    assert rewards.load([], needed=False) == ([], [])


def test_a_weight_for_each() -> None:
    _, (problem,) = rewards.load(["some_rewards:one"], [1.0, 2.0])
    assert (problem.where, problem.what) == ("train.reward_weights", "2 weights for 1 rewards")


@pytest.mark.engine
def test_those_of_trl() -> None:
    pytest.importorskip("trl")
    (found,), problems = rewards.load(["trl:think_format_reward"])
    assert problems == []
    good = [{"role": "assistant", "content": "<think>\nsums\n</think>\n7"}]
    assert found(completions=[good, [{"role": "assistant", "content": "7"}]]) == [1.0, 0.0]
    _, (unknown, maker) = rewards.load(["trl:accurate", "trl:get_repetition_penalty_reward"])
    assert "think_format_reward" in unknown.fix
    assert "makes a reward" in maker.what
    functions, problems = rewards.load(["trl:accuracy_reward"])
    if not functions:  # the package that it needs is not there
        assert "math-verify" in problems[0].fix


def score(function: rewards.Reward) -> list[float]:
    return rewards.score(
        function, prompts=["p"], completions=["c"], completion_ids=[[1]], columns={"answer": ["a"]}
    )


def test_scores() -> None:
    def of_columns(
        prompts: Any, completions: Any, completion_ids: Any, answer: Any
    ) -> list[float | None]:
        assert (prompts, completions, completion_ids, answer) == (["p"], ["c"], [[1]], ["a"])
        return [None]

    async def awaited(**_columns: Any) -> list[int]:
        return [1]

    assert math.isnan(score(of_columns)[0])
    assert score(awaited) == [1.0]
