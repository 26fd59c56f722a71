"""Rewards are told of as well, and stay what they are."""

from __future__ import annotations

import asyncio
import functools
import pickle
from typing import Any

import pytest

from asyncgrpo_engine import sampling
from asyncgrpo_engine.rewards import Scored

GATEWAY = "http://127.0.0.1:1"
PROMPT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
ANSWER = [{"role": "assistant", "content": "4"}]


class Heard:
    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []

    def sample(self, rollout: dict[str, Any]) -> None:
        self.samples.append(rollout)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()
    monkeypatch.setattr(sampling, "_events", lambda _: heard)
    return heard


def length(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.5 for _ in completions]


async def later(completions: list[Any], **_: Any) -> list[float | None]:
    return [None for _ in completions]


def broken(**_: Any) -> list[float | None]:
    raise RuntimeError("no")


def score(function: Any, answers: int = 2) -> Any:
    return function(
        prompts=[PROMPT] * answers,
        completions=[ANSWER] * answers,
        completion_ids=[[n, 7, 8] for n in range(answers)],
        gold=["4"] * answers,
    )


def test_one_of_a_group_is_told_with_every_reward(heard: Heard) -> None:
    both = sampling.wrapped([length, later], GATEWAY)
    assert [function.__name__ for function in both] == ["length", "later"]
    assert score(both[0]) == [0.5, 0.5]
    assert asyncio.run(score(both[1])) == [None, None]
    first, second = heard.samples
    assert (first["reward"], first["value"], first["functions"]) == ("length", 0.5, 2)
    assert (second["reward"], second["value"]) == ("later", None)
    assert first["head"] == second["head"]
    assert first["prompt"] == "system: Add.\n\nuser: 2+2?"
    assert (first["completion"], first["tokens"]) == ("assistant: 4", 3)


def test_what_a_reward_raises_comes_out(heard: Heard) -> None:
    with pytest.raises(RuntimeError, match="no"):
        score(sampling.wrapped(broken, GATEWAY))
    assert heard.samples == []


@pytest.mark.parametrize("values", [None, "ab", [1.0], [float("nan"), "x"]])
def test_values_that_are_wrong_are_TRLs_business(heard: Heard, values: Any) -> None:
    def odd(**_: Any) -> Any:
        return values

    assert score(sampling.wrapped(odd, GATEWAY)) is values
    assert all(sample["value"] is None for sample in heard.samples)


def test_wrappers_reach_another_process_under_their_own_names() -> None:
    weighted = Scored("math:length", length, 2.0)
    partly = functools.partial(length, scale=2)
    for function, name in ((length, "length"), (weighted, "length"), (partly, "length")):
        again = pickle.loads(pickle.dumps(sampling.wrapped(function, GATEWAY)))
        assert again.__name__ == name
    assert isinstance(sampling.wrapped(later, GATEWAY), sampling.SampledLater)
    assert sampling.wrapped(None, GATEWAY) is None
    assert sampling.wrapped(["a/reward-model"], GATEWAY) == ["a/reward-model"]


def test_long_texts_lose_their_middle() -> None:
    text = sampling.text_of("a" * 3000 + "b" * 3000)
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "[2000 characters left out]" in text
    assert len(text) < 4100
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert "add" in sampling.text_of([called])
