"""Block hashes name equal prefixes equally, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core import prompts
from asyncgrpo_agent.core.prompts import BLOCK_TOKENS, MAX_BLOCKS, block_hashes

TOKENS = st.lists(st.integers(0, 200_000), max_size=80)


@given(TOKENS, TOKENS)
def test_hashes_are_equal_as_far_as_the_blocks_are(first: list[int], second: list[int]) -> None:
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += 1
    ours, theirs = block_hashes("adapter", first), block_hashes("adapter", second)
    equal = [a == b for a, b in zip(ours, theirs, strict=False)]
    assert equal == [index < shared // BLOCK_TOKENS for index in range(len(equal))]


def test_only_whole_blocks_count() -> None:
    assert block_hashes("adapter", list(range(BLOCK_TOKENS - 1))) == []
    assert len(block_hashes("adapter", list(range(2 * BLOCK_TOKENS + 3)))) == 2


def test_adapters_share_no_blocks() -> None:
    tokens = list(range(64))
    assert not set(block_hashes("v1", tokens)) & set(block_hashes("v2", tokens))


def test_long_prompts_are_capped() -> None:
    assert len(block_hashes("adapter", [1] * (MAX_BLOCKS + 5) * BLOCK_TOKENS)) == MAX_BLOCKS


def test_hashes_are_small_enough_for_every_json_parser() -> None:
    assert all(0 <= value < 2**48 for value in block_hashes("adapter", list(range(640))))


@pytest.mark.parametrize(
    ("prompt", "tokens", "count"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([[1, 2, 3]], [1, 2, 3], 3),
        ([[1, 2], [3]], [], 3),
        ([], [], 0),
        ("12345", [], 2),
        (["1234", "12345"], [], 3),
        (None, [], 0),
    ],
)
def test_every_kind_of_prompt(prompt: prompts.Prompt, tokens: list[int], count: int) -> None:
    assert prompts.token_ids(prompt) == tokens
    assert prompts.count_tokens(prompt) == count
