"""The demonstration's files agree with each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo_task"


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    import sums

    return sums


def read(name: str) -> list[Any]:
    return [json.loads(line) for line in (DEMO / name).read_text().splitlines()]


def test_the_data_is_what_sums_makes(sums: Any) -> None:
    training, held_out = sums.split()
    assert read("train.jsonl") == training
    assert read("heldout.jsonl") == held_out


def test_no_held_out_sum_is_trained_on(sums: Any) -> None:
    asked = [
        {(row["prompt"][-1]["content"], row["answer"]) for row in read(name)}
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    assert not asked[0] & asked[1]
    wordings = len(sums.WORDINGS)
    assert [len(part) for part in asked] == [75 * wordings, 25 * wordings]


def test_the_model_is_small() -> None:
    size_bytes = sum(path.stat().st_size for path in (DEMO / "model").iterdir())
    assert size_bytes < 4_000_000
