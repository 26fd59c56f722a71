"""When a run is evaluated: before it, every so many steps beside it, and after it.

Beside training a thread samples, few answers at a time and at low priority, so that rollouts go
first; the version that it samples from is named once, at the beginning, and stays loaded for as
long as it is asked. Its result goes into TRL's own metrics, with the next step that is logged. An
evaluation that is due while the one before still runs is left out, and one that fails costs
training nothing.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Final, Literal

from transformers import TrainerCallback

from asyncgrpo_engine import trl_names
from asyncgrpo_engine.evaluation import Evaluation, Result, served_model
from asyncgrpo_engine.events import Events

BESIDE_TRAINING: Final = 4  # answers at a time
When = Literal["before", "during", "after"]


class Evaluations:
    """All of one run. `every_steps` 0: none beside training."""

    def __init__(self, evaluation: Evaluation, events: Events, every_steps: int) -> None:
        self._evaluation = evaluation
        self._beside = replace(evaluation, concurrency=BESIDE_TRAINING, is_low=True)
        self._events = events
        self._every_steps = every_steps
        self._thread: threading.Thread | None = None
        self._found: tuple[int, Result] | None = None  # step, of an evaluation that has ended

    def before(self) -> None:
        """Of the base model, which a new run starts from."""
        self._events.phase("evaluating")
        self._run(self._evaluation, "before", served_model(self._evaluation.gateway).name, 0)

    def after(self, trainer: Any) -> None:
        """Of the policy that training has ended with; it has to be published."""
        self.wait()
        self._events.phase("evaluating")
        step = int(trainer.state.global_step)
        self._run(self._evaluation, "after", trl_names.policy_name(trainer), step)

    def callback(self) -> TrainerCallback:
        return _EveryFewSteps(self)

    def is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step > 0 and step % self._every_steps == 0

    def begin(self, name: str, step: int) -> None:
        """Sample from the version `name`, in a thread."""
        if self._thread is not None and self._thread.is_alive():
            print(f"no evaluation at step {step}: the one before still runs", flush=True)
            return
        self._thread = threading.Thread(
            target=self._run_beside, args=(name, step), name="evaluation", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """What is known since the last call, by TRL's kind of names."""
        found, self._found = self._found, None
        if found is None:
            return {}
        return {"eval/accuracy": found[1].accuracy, "eval/step": float(found[0])}

    def _run_beside(self, name: str, step: int) -> None:
        try:
            self._found = step, self._run(self._beside, "during", name, step)
        except Exception as error:  # the reward's, the server's: training goes on
            print(f"evaluation at step {step} failed: {error}", flush=True)

    def _run(self, evaluation: Evaluation, when: When, name: str, step: int) -> Result:
        result = evaluation.run(name)
        self._events.evaluation(
            when,
            accuracy=result.accuracy,
            samples=result.samples,
            prompts=result.prompts,
            name=name,
            step=step,
        )
        print(
            f"accuracy {when} training: {result.accuracy:.3f} at step {step} "
            f"({result.samples} answers to {result.prompts} prompts, {name})",
            flush=True,
        )
        return result


class _EveryFewSteps(TrainerCallback):  # type: ignore[misc]
    """Begins evaluations once the policy of a step is published, which is when the next begins."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._trainer: Any = None
        self._begun_at = 0

    def watch(self, trainer: Any) -> None:
        """Before training."""
        self._trainer = trainer

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        self._begun_at = state.global_step

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        step = state.global_step
        if step > self._begun_at and self._evaluations.is_due(step):
            published = trl_names.published_step(self._trainer)
            self._evaluations.begin(trl_names.policy_name(self._trainer), published)

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_kwargs: Any) -> None:
        for name, value in self._evaluations.metrics().items():
            trl_names.add_metric(self._trainer, name, value)
