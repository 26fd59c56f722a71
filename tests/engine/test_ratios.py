"""The importance ratio by the class of the replicas that sampled, in TRL's own loss."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("trl")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import (  # noqa: E402
    RolloutGroup,
    TrainingSequence,
    _AsyncRolloutLoop,
)
from trl.experimental.async_grpo.packing import TreeRow  # noqa: E402

from asyncgrpo_engine import ratios  # noqa: E402

NOW = -1.0  # the trainer's log-probability of every token


class Model(torch.nn.Module):
    """Gives every token the same."""

    def forward(self, input_ids: Any, **_: Any) -> Any:
        log_probs = torch.full(input_ids.shape, NOW, requires_grad=True)
        return SimpleNamespace(log_probs=log_probs, entropy=torch.zeros(input_ids.shape))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    collator = async_grpo_trainer.DataCollatorForRollout
    monkeypatch.setattr(collator, "torch_call", collator.torch_call)
    made = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    made.compute_loss = lambda *args, **kwargs: AsyncGRPOTrainer.compute_loss(made, *args, **kwargs)
    ratios.split(made)
    return made


def sample(prompt: int, answer: list[int], sampled_at: float, kind: str = "") -> dict[str, Any]:
    """A rollout as the trainer gets it from TRL's queue."""
    metrics: dict[str, Any] = {"reward": 1.0} | ({ratios.CLASS: kind} if kind else {})
    return {
        "input_ids": np.asarray([1, prompt, *answer]),
        "completion_mask": np.asarray([0, 0] + [1] * len(answer)),
        "old_log_probs": np.asarray([0.0, 0.0] + [sampled_at] * len(answer), dtype=np.float32),
        "advantage": 1.0,
        "group_id": prompt,
        "metrics": metrics,
    }


def step(trainer: Any, *rows: list[dict[str, Any]]) -> tuple[dict[str, float], float]:
    """What is logged of one batch with a row for each rank, as the first one sees it; the loss."""
    packed = []
    for row in rows:
        packed.append(TreeRow())
        for one in row:
            packed[-1].add(one)
    metrics = trainer._metrics["train"]
    metrics.clear()
    collator = async_grpo_trainer.DataCollatorForRollout(0, len(rows), metrics=metrics)
    batch = {key: value[:1] for key, value in collator.torch_call([packed]).items()}
    loss = trainer.compute_loss(Model(), batch)
    reduced = {
        name: async_grpo_trainer._reduce_metric(name, all_) for name, all_ in metrics.items()
    }
    return {name: value for name, value in reduced.items() if name.startswith("ratio")}, float(loss)


def test_each_class_has_its_own_and_the_loss_stays(trainer: Any) -> None:
    plain = [sample(5, [6, 7, 8], NOW), sample(5, [6, 9], NOW)]
    assert step(trainer, plain) == ({"ratio": 1.0}, pytest.approx(-1.0))

    def odd(kind: str) -> dict[str, Any]:
        return sample(5, [6, 7, 4, 3, 2], NOW - 0.1, kind)

    expected = (5 + 5 * math.exp(0.1)) / 10
    alone, loss = step(trainer, [*plain, odd("")])
    assert alone == {"ratio": pytest.approx(expected)}
    split, same_loss = step(trainer, [*plain, odd("fp8")])
    assert same_loss == pytest.approx(loss)
    assert split == {
        "ratio": pytest.approx(expected),
        "ratio/plain": pytest.approx(1.0),
        "ratio/fp8": pytest.approx(math.exp(0.1)),
    }
    # From then on the plain ones are told of even without the others.
    assert step(trainer, plain)[0] == {"ratio": 1.0, "ratio/plain": 1.0}


def test_rows_of_several_ranks_may_differ_in_length(trainer: Any) -> None:
    first = [sample(5, [6], NOW - 0.2, "awq")]
    second = [sample(9, [6, 7], NOW), sample(9, [8], NOW, "fp8")]
    assert step(trainer, first, second)[0] == {
        "ratio": pytest.approx(math.exp(0.2)),
        "ratio/awq": pytest.approx(math.exp(0.2)),
    }


def test_too_many_classes_end_in_one(trainer: Any) -> None:
    rows = [sample(n, [6], NOW, f"k{n:02}") for n in range(2, 2 + 2 * ratios.MAX_CLASSES)]
    found, _ = step(trainer, rows)
    assert len(found) == 1 + ratios.MAX_CLASSES - 1  # `ratio` and all but the plain one


class Loop(_AsyncRolloutLoop):
    """TRL's, with answers that are given here."""

    def __init__(self, classes: list[str]) -> None:
        self._classes = iter(classes)
        self.turns = 1

    async def _post(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        return {"choices": [{}], **({ratios.CLASS: kind} if (kind := next(self._classes)) else {})}

    async def _generate_one(self, *_: Any, **__: Any) -> Any:
        for _turn in range(self.turns):
            await self._post("/v1/completions", {}, 1)
        return [], [], [TrainingSequence([1, 2], [0, 1], [0.0, -1.0], "r")], 0, 0, None

    async def _score_group(self, group: RolloutGroup) -> Any:
        rows = [row for several in group.completions_sequences for row in several]
        return [SimpleNamespace(metrics={"reward": 1.0}) for _ in rows]


def conversations(classes: list[str], turns: int = 1) -> list[Any]:
    """What the samples of a group say, whose conversations run at the same time."""

    async def run() -> list[Any]:
        loop = ratios.noting(Loop)(classes)
        loop.turns = turns
        made = [asyncio.create_task(loop._generate_one()) for _ in range(len(classes) // turns)]
        sequences = [result[2] for result in await asyncio.gather(*made)]
        samples = await loop._score_group(SimpleNamespace(completions_sequences=sequences))
        return [one.metrics.get(ratios.CLASS) for one in samples]

    return asyncio.run(run())


def test_a_sample_says_who_gave_it_unless_it_is_the_plain_kind() -> None:
    assert conversations(["", "fp8", "", "awq"]) == [None, "fp8", None, "awq"]


def test_turns_of_several_classes_are_mixed() -> None:
    # Two conversations at once: their first turns come before their second ones.
    assert conversations(["fp8", "fp8", "fp8", ""], turns=2) == ["fp8", ratios.MIXED]
