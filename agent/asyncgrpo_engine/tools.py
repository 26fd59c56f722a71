"""The tools and environments of a job: what the model may call between its turns.

TRL 1.16 takes tools as functions with type hints and a docstring, and an environment as a class (or
any factory) whose objects have `reset`, tools as methods, and maybe `get_reward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncgrpo_engine import named, trl_names
from asyncgrpo_engine.problems import Problem, from_exception

_NOT_TOOLS: Final = ("reset", "get_reward")
_DESCRIBE: Final = "give it type hints and a docstring with a line for each argument"


@dataclass(slots=True, kw_only=True)
class Tooling:
    """What TRL's trainer is given; empty for a job without tools."""

    tools: list[Callable[..., Any]] = field(default_factory=list)
    environment_factory: Any = None
    """One factory, or a dict of them by the rows' `environment`."""
    shown: list[Callable[..., Any]] = field(default_factory=list)
    """All that a prompt may describe, methods of environments included."""
    gives_rewards: bool = False
    """An environment has `get_reward`, so that a reward function is not needed."""

    @property
    def is_empty(self) -> bool:
        return not self.tools and self.environment_factory is None


def load(
    tools: Sequence[str], factory: str, environments: Mapping[str, str]
) -> tuple[Tooling, list[Problem]]:
    """Everything by its name, each described as a model needs it."""
    found = Tooling()
    problems: list[Problem] = []
    for name in tools:
        where = f"train.tools {name!r}"
        tool = named.load(name, where)
        if isinstance(tool, Problem):
            problems.append(tool)
        elif not inspect.isfunction(tool):
            problems.append(Problem(what="no function", where=where, fix="write it with def"))
        else:
            found.tools.append(tool)
            found.shown.append(tool)
            problems += _undescribed(tool, where)
    places = {f"train.environments.{key}": (key, name) for key, name in environments.items()}
    if factory and places:
        what = "useless beside train.environment_factory"
        problems.append(Problem(what=what, where="train.environments", fix="leave one of them out"))
    elif factory:
        made, of_factory = _factory(found, factory, f"train.environment_factory {factory!r}")
        found.environment_factory, problems = made, problems + of_factory
    for where, (key, name) in places.items():
        made, of_factory = _factory(found, name, f"{where} {name!r}")
        found.environment_factory = {**(found.environment_factory or {}), key: made}
        problems += of_factory
    return found, problems


def _factory(
    found: Tooling, name: str, where: str
) -> tuple[Callable[[], Any] | None, list[Problem]]:
    made = named.load(name, where)
    if isinstance(made, Problem):
        return None, [made]
    try:
        if inspect.isclass(made):
            kind = made
            inspect.signature(made).bind()
        else:
            kind = type(made())
    except Exception as error:  # the user's own code
        return None, [from_exception(error, where=where, fix="it is called without arguments")]
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    found.gives_rewards = found.gives_rewards or "get_reward" in methods
    own = {name: method for name, method in methods.items() if not name.startswith("_")}
    found.shown += [own[name] for name in own if name not in _NOT_TOOLS]
    return made, list(_environment_problems(own, where))


def _environment_problems(methods: Mapping[str, Any], where: str) -> Iterator[Problem]:
    if "reset" not in methods:
        yield Problem(what="has no method reset", where=where, fix="add reset(self, **row)")
    for name, method in methods.items():
        if name not in _NOT_TOOLS:
            yield from _undescribed(method, f"{where}, method {name}")


def _undescribed(function: Callable[..., Any], where: str) -> Iterator[Problem]:
    """What transformers cannot describe to the model."""
    try:
        trl_names.describe_tool(function)
    except Exception as error:  # several types of transformers
        yield from_exception(error, where=where, fix=_DESCRIBE)


def template_problems(tokenizer: Any, model: str) -> list[Problem]:
    """Whether the model's chat template knows what tools are."""
    if trl_names.supports_tools(tokenizer):
        return []
    return [
        Problem(
            what="its chat template has no place for tools",
            where=f"model.path {model!r}",
            fix="use a model that was tuned for tool calls, or leave train.tools out",
        )
    ]
