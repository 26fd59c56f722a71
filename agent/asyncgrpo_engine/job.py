"""The job that the agent hands over: one JSON file, decoded once.

Invariant: values are as the agent wrote them. `grpo` and `lora` belong to TRL and PEFT and are
not interpreted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from asyncgrpo_engine.problems import Problem, RefusedError, from_exception, unknown_names


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from: a file, or a dataset of the hub with its configuration and split."""

    path: str
    config: str = ""
    split: str = "train"
    key: str = "train.dataset"

    @property
    def is_on_hub(self) -> bool:
        return not Path(self.path).is_absolute()

    @property
    def where(self) -> str:
        return f"{self.key} {self.path!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """Answers to sample before and after training; none when `samples` is 0."""

    dataset: str = ""  # empty: the training data
    dataset_config: str = ""
    dataset_split: str = "train"
    every_steps: int = 0  # 0: before and after training only
    samples: int = 0
    max_tokens: int = 0  # 0: max_completion_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    model: str
    output_dir: str
    gateway: str
    dataset: str = ""  # a file, or the hub's owner/name
    dataset_config: str = ""
    dataset_split: str = "train"
    rewards: list[str] = field(default_factory=list)
    reward_weights: list[float] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    environment_factory: str = ""
    environments: dict[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False
    script: str = ""  # a program of the user's own, in place of dataset, rewards and lora
    script_args: list[str] = field(default_factory=list)
    sample_rollouts: bool = False  # for people to read
    save_s: float = 0.0  # that a stop may take to save a checkpoint
    python_path: list[str] = field(default_factory=list)
    grpo: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    init_from: str = ""  # folder of an adapter that a new run begins with
    eval: Eval = field(default_factory=Eval)

    @property
    def training_data(self) -> Source:
        return Source(self.dataset, self.dataset_config, self.dataset_split, "train.dataset")

    @property
    def eval_data(self) -> Source:
        """The training data, unless evaluation has its own."""
        own = self.eval
        if not own.dataset:
            return self.training_data
        return Source(own.dataset, own.dataset_config, own.dataset_split, "train.eval.dataset")

    @property
    def cache_dir(self) -> Path:
        """Where datasets are kept as Arrow files, which the rollout process maps as well."""
        return Path(self.output_dir) / ".datasets"


def read_job(path: Path) -> Job:
    """Decode the job file, or raise `RefusedError` with all that is wrong with it."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RefusedError([from_exception(error, where=str(path))]) from error
    if not isinstance(table, dict):
        raise RefusedError([Problem(what="the job is no JSON object", where=str(path))])
    problems = _shape_problems(table, Job, "job") + _shape_problems(
        table.get("eval", {}), Eval, "eval"
    )
    if problems:
        raise RefusedError(problems)
    return Job(**{**table, "eval": Eval(**table.get("eval", {}))})


def _shape_problems(table: Any, shape: type, section: str) -> list[Problem]:
    if not isinstance(table, Mapping):
        return [Problem(what="not a JSON object", where=section)]
    known = {item.name: item for item in fields(shape)}
    needed = {
        name
        for name, item in known.items()
        if item.default is MISSING and item.default_factory is MISSING
    }
    problems = unknown_names(table, known, section=section, owner="the job")
    problems += [
        Problem(what=f"{name!r} is missing", where=section) for name in sorted(needed - set(table))
    ]
    return problems
