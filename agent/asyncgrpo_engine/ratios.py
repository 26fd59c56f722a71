"""TRL's `ratio` for each class of replicas: those that serve the model quantised sample from other
probabilities than the trainer's, and the mean over a batch hides by how much.

The gateway says in an answer which class of replicas gave it, unless it is the plain one. That goes
with the rollout through TRL's rollout process into its batch, where the loss is taken: there the
importance ratio of each trained token is known, and so is the rollout that it belongs to. What is
logged, `ratio/CLASS`, is the mean over all trained tokens of that class since the last log, of all
ranks. A conversation whose turns came from several classes is one of its own, for its tokens cannot
be told apart any more.

As long as no answer names a class, nothing is added to a batch and nothing is logged. With
`trl_names` this is where TRL's inner names are known.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from asyncgrpo_engine import trl_names

CLASS: Final = "agrpo_class"  # of an answer, as the gateway calls it; of a rollout; of a batch
PLAIN: Final = "plain"
MIXED: Final = "mixed"
MAX_CLASSES: Final = 8  # any more are counted with the last one

_answered: ContextVar[set[str] | None] = ContextVar("answered", default=None)


# --- in the rollout process --------------------------------------------------------------------


def noting(loop: Any) -> Any:
    """TRL's rollout loop, a class, whose samples say which class of replicas gave them."""

    class Noting(loop):  # type: ignore[misc]
        async def _post(self, *args: Any, **kwargs: Any) -> Any:
            answer = await super()._post(*args, **kwargs)
            answered = _answered.get()
            if answered is not None and answer.get("choices"):
                answered.add(str(answer.get(CLASS) or PLAIN))
            return answer

        async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
            answered: set[str] = set()
            _answered.set(answered)  # of this conversation alone: it is a task of its own
            result = await super()._generate_one(*args, **kwargs)
            for sequence in result[2]:
                setattr(sequence, CLASS, _one_of(answered))
            return result

        async def _score_group(self, group: Any) -> Any:
            samples = await super()._score_group(group)
            sequences = [one for several in group.completions_sequences for one in several]
            for sample, sequence in zip(samples, sequences, strict=True):
                if (name := getattr(sequence, CLASS, PLAIN)) != PLAIN:
                    sample.metrics[CLASS] = name
            return samples

    return Noting


def _one_of(answered: set[str]) -> str:
    return next(iter(answered)) if len(answered) == 1 else MIXED if answered else PLAIN


# --- in the trainer ----------------------------------------------------------------------------


def split(trainer: Any) -> None:
    """Have `ratio` logged for each class as well; on every rank, before training."""
    names = [PLAIN]  # those that were seen; a batch knows them by their place. Of the first rank.
    collator = importlib.import_module(trl_names.places().trainer).DataCollatorForRollout
    collator.torch_call = _naming(collator.torch_call, names)
    trainer.compute_loss = _splitting(trainer.compute_loss, trainer, names)


def _naming(original: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The collator: a batch tells the class of each of its samples, by rows as TRL packs them."""

    @functools.wraps(original)
    def torch_call(self: Any, examples: list[Any]) -> Any:
        (rows,) = examples
        # Taken out: TRL averages what else is among the metrics of a sample.
        found = [[one["metrics"].pop(CLASS, PLAIN) for one in row.samples] for row in rows]
        batch = original(self, examples)
        for name in sorted({name for row in found for name in row} - set(names)):
            if len(names) < MAX_CLASSES:
                names.append(name)
        if len(names) > 1:
            batch[CLASS] = _padded([[_place(names, name) for name in row] for row in found])
        return batch

    return torch_call


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names) - 1


def _padded(rows: list[list[int]]) -> Any:
    import torch

    most = max(map(len, rows))
    return torch.tensor([row + [-1] * (most - len(row)) for row in rows])


def _splitting(original: Callable[..., Any], trainer: Any, names: list[str]) -> Callable[..., Any]:
    """The loss, which stays what it is; what the model answers within it is looked at once more."""

    @functools.wraps(original)
    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if CLASS not in inputs:  # on all ranks alike
            return original(model, inputs, *args, **kwargs)
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            hook.remove()
        sums = trainer.accelerator.reduce(ratio_sums(outputs[-1].log_probs, inputs), "sum")
        for name, (total, tokens) in zip(names, sums.tolist(), strict=False):
            if tokens:  # TRL divides the sums of a window
                trainer._metrics["train"][f"ratio/{name}"].append((total, tokens))
        return loss

    return compute_loss


def ratio_sums(log_probs: Any, inputs: Any) -> Any:
    """Sum of the importance ratios and number of the trained tokens, by class: [MAX_CLASSES, 2].

    `log_probs` are those of each packed position, as in TRL's loss.
    """
    import torch

    with torch.no_grad():
        is_term = inputs["token_index"] >= 0
        now = log_probs.flatten()[inputs["token_index"][is_term]]
        ratio = torch.exp(now - inputs["old_log_probs"][is_term]).float()
        of_sample = inputs[CLASS][0]
        of_token = of_sample[inputs["segment_id"][is_term]]
        both = torch.stack((ratio, torch.ones_like(ratio)), dim=1)
        sums = torch.zeros(MAX_CLASSES, 2, device=ratio.device)
        return sums.index_add_(0, of_token, both)
