"""What the agent adds to any AsyncGRPOTrainer, built by itself or by a user's own program.

It hears of every step, ends training only between two of them, and leaves a checkpoint then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from asyncgrpo_engine import lifetime, trl_names
from asyncgrpo_engine.events import Events, numbers
from asyncgrpo_engine.problems import Problem, RefusedError


def refuse_other_syncs(trainer: Any) -> None:
    """Raises RefusedError if this trainer would not publish adapters."""
    if not trl_names.syncs_adapters(trainer):
        what = "TRL would push whole models over NCCL instead of adapters"
        problem = Problem(what=what, where="the LoRA configuration", fix="see its warning above")
        raise RefusedError([problem])


@contextmanager
def ending_whole(trainer: Any, save_s: float) -> Iterator[None]:
    """Around training: a stop costs no step, unless checkpoints are not wanted."""
    lifetime.allow_saving(save_s)
    try:
        yield
    except lifetime.Stopped:
        _save_before_leaving(trainer)
        raise


def _save_before_leaving(trainer: Any) -> None:
    step = trainer.state.global_step
    if step and trl_names.saves_checkpoints(trainer) and not trl_names.is_saved(trainer):
        trl_names.save_checkpoint(trainer)
        print(f"saved checkpoint-{step} before leaving", flush=True)


class EventCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the agent, and standard output in one line a step, how training goes.

    It is also who knows when a step is whole: then, and never within, training may be stopped. One
    process may be stopped while it waits for rollouts, too. Several have to stop at the same step,
    for they save together, so they ask one another at the end of each.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._accelerator: Any = None

    def watch(self, trainer: Any) -> None:
        """Before training."""
        if trainer.accelerator.num_processes > 1:
            self._accelerator = trainer.accelerator

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._events.limits(trl_names.limits(args))
            self._events.phase("training")
        if self._accelerator is not None:
            lifetime.hold()

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        lifetime.hold()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        if self._accelerator is None:
            lifetime.release()
        elif trl_names.any_rank(self._accelerator, lifetime.is_wanted()):
            lifetime.stop()

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: Any = None, **_kwargs: Any
    ) -> None:
        values = numbers(logs or {})
        if "train_runtime" in values or not state.is_world_process_zero:
            return  # the summary at the end is no step
        self._events.metrics(step=state.global_step, max_steps=state.max_steps, values=values)
        names = ["reward", "ratio", *(name for name in values if name.startswith("ratio/")), "loss"]
        shown = " ".join(f"{name}={values[name]:.4g}" for name in names if name in values)
        print(f"step {state.global_step}/{state.max_steps} {shown}", flush=True)
