"""The user's reward functions: found by name, callable, and importable again in TRL's rollout
process, which gets them pickled by module and name.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncgrpo_engine.problems import Problem, from_exception

Reward = Callable[..., Any]


def extend_path(folders: Iterable[str]) -> None:
    """Put `folders` first on the import path. A spawned process inherits the path."""
    for folder in reversed(list(folders)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def load(names: Sequence[str]) -> tuple[list[Reward], list[Problem]]:
    """The functions named "module:function", and what is wrong with the others."""
    functions: list[Reward] = []
    problems: list[Problem] = []
    for name in names:
        found = _load_one(name)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            functions.append(found)
    if not names:
        problems.append(
            Problem(what="no reward function", where="train.rewards", fix='add "module:function"')
        )
    return functions, problems


def _load_one(name: str) -> Reward | Problem:
    where = f"train.rewards {name!r}"
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        return Problem(what="not a reward name", where=where, fix="write module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        fix = "name its folder in train.python_path, and install what it imports"
        return from_exception(error, where=where, fix=fix)
    function = getattr(module, attribute, None)
    if not callable(function):
        return Problem(
            what=f"{module.__file__} has no function {attribute!r}",
            where=where,
            fix=_offer(module),
        )
    try:
        pickle.dumps(function)
    except Exception as error:  # pickling runs the object's own code
        return from_exception(error, where=where, fix="define it with def at module level")
    reward: Reward = function
    return reward


def _offer(module: Any) -> str:
    names = [
        name
        for name, member in inspect.getmembers(module, inspect.isfunction)
        if member.__module__ == module.__name__ and not name.startswith("_")
    ]
    return f"it has {', '.join(names)}" if names else "define it there"


def score(
    function: Reward,
    *,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> list[float]:
    """Call one reward as TRL does. A reward of None becomes NaN: that answer has no score."""
    values = function(
        prompts=prompts, completions=completions, completion_ids=completion_ids, **columns
    )
    if inspect.isawaitable(values):
        values = asyncio.run(_result(values))
    return [math.nan if value is None else float(value) for value in values]


async def _result(awaitable: Any) -> Any:
    return await awaitable
