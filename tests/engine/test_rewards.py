"""Reward functions by name, scored as TRL scores them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_engine import rewards

SOURCE = """
class Half:
    def __call__(self, **columns): return [0.5]
class Stuck:
    def __reduce__(self): raise TypeError("stays here")
    def __call__(self, **columns): return [1]
def one(completions, **columns): return [1 for _ in completions]
def _hidden(): pass
half = Half()
stuck = Stuck()
nothing = 3
local = lambda **columns: [0]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    rewards.extend_path([str(tmp_path)])
    for name in ("some_rewards", "broken_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_functions_and_callable_objects() -> None:
    functions, problems = rewards.load(["some_rewards:one", "some_rewards:half"])
    assert problems == []
    assert len(functions) == 2


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("some_rewards", "not a reward name", "write module:function"),
        (":one", "not a reward name", "write module:function"),
        ("no_such_module:one", "ModuleNotFoundError", "train.python_path"),
        ("broken_rewards:one", "ZeroDivisionError", "train.python_path"),
        ("some_rewards:two", "has no function 'two'", "it has local, one"),
        ("some_rewards:nothing", "has no function 'nothing'", "it has local, one"),
        ("some_rewards:stuck", "stays here", "module level"),
        ("some_rewards:local", "lambda", "module level"),
    ],
)
def test_names_that_do_not_work(name: str, what: str, fix: str) -> None:
    _, (problem,) = rewards.load([name])
    assert what in problem.what
    assert fix in problem.fix
    assert repr(name) in problem.where


def test_none_at_all() -> None:
    _, (problem,) = rewards.load([])
    assert problem.what == "no reward function"


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
