"""A user's own program that builds an AsyncGRPOTrainer, run unedited with the agent's values.

The names that it imports are TRL's own; their `__init__` and `train` are wrapped before it runs. A
value of the program that contradicts the agent's cannot work, so the agent's counts, and the
program's output says so. The program runs as `__main__` under its own file name, so that TRL's
rollout process finds it again, as it would without the agent.
"""

from __future__ import annotations

import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from asyncgrpo_engine import attention, checks, origin, ratios, sampling, setup, trl_names
from asyncgrpo_engine.events import Events
from asyncgrpo_engine.job import Job
from asyncgrpo_engine.problems import Problem, from_exception
from asyncgrpo_engine.watching import EventCallback, ending_whole, refuse_other_syncs

_RESUME: Final = "resume_from_checkpoint"


def check(job: Job) -> list[Problem]:
    """What can be known without running it."""
    path = Path(job.script)
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        return [from_exception(error, where=f"train.script {job.script!r}", fix="correct the file")]
    return []


def run(job: Job, events: Events) -> None:
    """Run it to its end. Whatever it raises comes out, SystemExit included."""
    kind, reason = attention.install(attention.probe())
    inject(job, events, f"{kind} ({reason})")
    sys.argv = [job.script, *job.script_args]
    sys.path.insert(0, str(Path(job.script).resolve().parent))
    runpy.run_path(job.script, run_name="__main__")
    events.phase("done")


def inject(job: Job, events: Events, attention_path: str) -> None:
    """Wrap TRL's two classes for as long as this process lives."""
    config, trainer = trl_names.config_class(), trl_names.trainer_class()
    config.__init__ = _configured(config.__init__, job)
    trainer.__init__ = _watched(trainer.__init__, job, events, attention_path)
    trainer.train = _resumed(trainer.train, job, events)


def _configured(original: Callable[..., None], job: Job) -> Callable[..., None]:
    """AsyncGRPOConfig: the agent's values, and this device's defaults where none is given."""
    ours = {
        **job.grpo,
        "output_dir": job.output_dir,
        "vllm_server_base_url": job.gateway.rstrip("/"),
    }
    ours.pop(_RESUME, None)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        _report(given, ours, "AsyncGRPOConfig")
        del given["self"]
        original(self, **{**checks.device_defaults(), **given, **ours})

    return init


def _watched(
    original: Callable[..., None], job: Job, events: Events, attention_path: str
) -> Callable[..., None]:
    """AsyncGRPOTrainer: its steps are heard of, before any callback of the program's."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        watching = EventCallback(events)
        given["callbacks"] = [watching, *(given.get("callbacks") or [])]
        del given["self"]
        if job.sample_rollouts:
            given["reward_funcs"] = sampling.wrapped(given.get("reward_funcs"), job.gateway)
        original(self, **given)
        checkpoint = job.grpo.get(_RESUME)
        facts = setup.facts(
            self.args,
            attention=attention_path,
            begins_with=job.init_from or checkpoint or "",
            first_step=trl_names.step_of(checkpoint),
        )
        setup.tell(facts, events)
        watching.watch(self)
        trl_names.begin_rollouts_with(setup.begin_rollouts, ratios.noting)
        ratios.split(self)
        trl_names.end_rollouts_at_once(self)
        trl_names.notice_dead_rollouts(self)
        refuse_other_syncs(self)
        if job.init_from:
            origin.load(self, Path(job.init_from))

    return init


def _resumed(original: Callable[..., Any], job: Job, events: Events) -> Callable[..., Any]:
    """AsyncGRPOTrainer.train: from the run's checkpoint, and with the result saved."""
    signature = inspect.signature(original)
    checkpoint = job.grpo.get(_RESUME)
    ours = {} if checkpoint is None else {_RESUME: checkpoint}

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        _report(given, ours, "train")
        del given["self"]
        with ending_whole(self, job.save_s):
            result = original(self, **{**given, **ours})
        events.phase("saving")
        trl_names.save_adapter(self, Path(job.output_dir) / "final")
        events.saved(int(self.state.global_step))
        return result

    return train


def _report(given: Mapping[str, Any], ours: Mapping[str, Any], owner: str) -> None:
    """Say which values of the program do not count."""
    for name, value in ours.items():
        if given.get(name) not in (None, value):
            print(
                f"{owner}: {name}={given[name]!r} of the program is replaced by {value!r}",
                flush=True,
            )


def environment(job: Job) -> dict[str, str]:
    """The same values for a program that asks."""
    values = {
        "ASYNCGRPO_GATEWAY": job.gateway,
        "ASYNCGRPO_OUTPUT_DIR": job.output_dir,
        "ASYNCGRPO_MODEL": job.model,
        "ASYNCGRPO_RESUME_FROM": str(job.grpo.get(_RESUME, "")),
    }
    return {name: value for name, value in values.items() if value}


def export(job: Job) -> None:
    os.environ.update(environment(job))
