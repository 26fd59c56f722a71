"""The sums of the demonstration: how they are asked, and which are kept from training.

All wordings of one pair are on the same side, so no held-out sum was ever trained on.
"""

from __future__ import annotations

import random
from typing import Final

DIGITS: Final = range(10)
WORDINGS: Final = ("{a}+{b}", "{a} plus {b}", "add {a} and {b}")
SYSTEM: Final = "Answer with a number."
HELD_OUT_PAIRS: Final = 25
SPLIT_SEED: Final = 11

Row = dict[str, object]


def prompt(a: int, b: int, wording: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": wording.format(a=a, b=b)},
    ]


def split() -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, shuffled."""
    shuffle = random.Random(SPLIT_SEED)
    pairs = [(a, b) for a in DIGITS for b in DIGITS]
    shuffle.shuffle(pairs)
    held_out, training = _rows(pairs[:HELD_OUT_PAIRS]), _rows(pairs[HELD_OUT_PAIRS:])
    shuffle.shuffle(training)
    shuffle.shuffle(held_out)
    return training, held_out


def _rows(pairs: list[tuple[int, int]]) -> list[Row]:
    return [
        {"prompt": prompt(a, b, wording), "answer": str(a + b)}
        for a, b in pairs
        for wording in WORDINGS
    ]
