from __future__ import annotations

import pytest

from asyncgrpo_agent.core.adapters import CommitKey
from asyncgrpo_agent.core.finals import final_folder, final_key, newest_first, parse_final_key


@pytest.mark.parametrize(("step", "retry"), [(0, 0), (500, 0), (1_000_000, 7)])
def test_a_key_is_read_back(step: int, retry: int) -> None:
    key = final_key("a0003-7f3c", step, retry)
    assert key == f"{final_folder('a0003-7f3c', step, retry)}.toml"
    assert parse_final_key(key) == CommitKey(attempt="a0003-7f3c", version=step, retry=retry)


@pytest.mark.parametrize(
    "key",
    [
        "final/a0003-7f3c/s000500",
        "final/a0003-7f3c/s0500.toml",
        "final/a0003-7f3c/s000500-r0.toml",
        "final/a3/s000500.toml",
        "commits/a0003-7f3c/000000/v000500.toml",
        "final/a0003-7f3c/x/s000500.toml",
    ],
)
def test_other_keys_are_none(key: str) -> None:
    assert parse_final_key(key) is None


def test_the_highest_attempt_goes_before_the_highest_step() -> None:
    old, new = "a0002-ffff", "a0003-0000"
    keys = [final_key(old, 900), final_key(new, 40), final_key(new, 50), final_key(new, 50, 1)]
    assert newest_first([*keys, "final/a0003-0000/notes.txt"]) == keys[::-1][:3] + keys[:1]
