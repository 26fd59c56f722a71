"""The reward of the demonstration: 1 for the exact answer, 0 for any other."""

from __future__ import annotations

from typing import Any


def exact_answer(completions: list[Any], answer: list[str], **_columns: Any) -> list[float]:
    """`completions` are conversations, `answer` is the dataset's column of that name."""
    return [
        float((messages[-1].get("content") or "").strip() == wanted)
        for messages, wanted in zip(completions, answer, strict=True)
    ]
