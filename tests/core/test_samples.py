"""Rollouts are put together from what two sides know, and no more than wanted."""

from typing import Any

import pytest

from asyncgrpo_agent.core.samples import HEAD_TOKENS, MAX_OPEN, SCORED_S, Answer, SampleBook

R1 = Answer("r1", 3, 0.5)


def event(
    first: int, *, reward: str = "exact", functions: int = 1, value: Any = 1.0
) -> dict[str, Any]:
    return {
        "head": list(range(first, first + HEAD_TOKENS)),
        "tokens": 20,
        "prompt": "2+2?",
        "completion": "4",
        "reward": reward,
        "value": value,
        "functions": functions,
    }


def ids(first: int) -> list[int]:
    return list(range(first, first + 20))


def test_a_rollout_is_whole_when_every_function_has_scored_it() -> None:
    book = SampleBook(60)
    book.answered(ids(0), R1, 0.0)
    assert book.scored(event(0, functions=2), 0.0) is None
    sample = book.scored(event(0, reward="format", functions=2, value=None), 0.1)
    assert sample is not None
    assert (sample.rewards, sample.answer) == ({"exact": 1.0, "format": None}, R1)
    assert (sample.prompt, sample.completion, sample.tokens) == ("2+2?", "4", 20)


def test_who_answered_is_left_open_where_two_began_with_the_same() -> None:
    book = SampleBook(6000)
    assert (found := book.scored(event(0), 0.0)) is not None
    assert found.answer is None
    book.answered(ids(100), R1, 0.0)
    book.answered(ids(100), R1, 1.0)
    book.answered(ids(200), R1, 0.0)
    book.answered(ids(200), Answer("r2", 3, 0.5), 1.0)
    book.answered(ids(300), Answer("r1", 2, 0.5), 0.0)
    book.answered(ids(300), R1, 1.0)
    book.answered(ids(400), Answer("r2", 2, 0.5), 0.0)
    book.answered(ids(400), R1, SCORED_S)
    found_answers = [
        sample.answer
        for number in (100, 200, 300, 400)
        if (sample := book.scored(event(number), SCORED_S + number)) is not None
    ]
    assert found_answers == [R1, ("", 3, 0.5), ("r1", -1, 0.5), R1]


def test_no_more_than_asked_for_a_minute() -> None:
    book = SampleBook(6)
    taken = [book.scored(event(100 * n), n / 10) is not None for n in range(1200)]
    assert 12 <= sum(taken) <= 13


def test_what_is_never_whole_does_not_pile_up() -> None:
    book = SampleBook(60_000)
    for n in range(MAX_OPEN * 4):
        assert book.scored(event(100 * n, functions=2), float(n)) is None
    assert len(book._open) == MAX_OPEN
    with pytest.raises(KeyError):
        book.scored({"head": [1]}, 1e6)
