"""What a router needs to know of a prompt: how long it is, and which blocks of it are cached where.

vLLM caches prompts in blocks of 16 tokens, each block named by all tokens up to its end. The hashes
here are chained in the same way and seeded with the adapter's physical name, so that equal hashes
mean an equal cached prefix. They are made by one process, the gateway, and only ever compared, so
Python's own hash does, at a tenth of a digest's cost. 48 bits keep envelopes small, and a
collision costs one misplaced rollout, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

BLOCK_TOKENS: Final = 16
MAX_BLOCKS: Final = 1024  # 16,384 tokens tell prompts apart; a longer list only swells envelopes
_HASH_MASK: Final = (1 << 48) - 1
_TEXT_BYTES_PER_TOKEN: Final = 4

Prompt = str | list[int | str | list[int]] | None
"""A completion's `prompt` as vLLM takes it: text, token ids, or a list of either."""


def token_ids(prompt: Prompt) -> list[int]:
    """The token ids of a single prompt given as such; empty for text and for several prompts."""
    if not isinstance(prompt, list):
        return []
    if len(prompt) == 1 and isinstance(prompt[0], list):
        return prompt[0]
    tokens = [item for item in prompt if isinstance(item, int)]
    return tokens if len(tokens) == len(prompt) else []


def count_tokens(prompt: Prompt) -> int:
    """Exact for token ids, an estimate for text."""
    if prompt is None:
        return 0
    if isinstance(prompt, str):
        return estimate_tokens(len(prompt.encode()))
    return sum(1 if isinstance(item, int) else _count_item(item) for item in prompt)


def _count_item(item: str | list[int]) -> int:
    return count_tokens(item) if isinstance(item, str) else len(item)


def estimate_tokens(text_bytes: int) -> int:
    return -(-text_bytes // _TEXT_BYTES_PER_TOKEN)


def block_hashes(seed: str, tokens: Sequence[int]) -> list[int]:
    """One chained hash for each whole block of `tokens`, at most MAX_BLOCKS."""
    parent = hash(seed)
    hashes = []
    for block in islice(zip(*[iter(tokens)] * BLOCK_TOKENS, strict=False), MAX_BLOCKS):
        parent = hash((parent, block))
        hashes.append(parent & _HASH_MASK)
    return hashes
