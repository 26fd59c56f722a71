"""The job's reward functions: the user's own by name, and TRL's as "trl:NAME".

Each is wrapped, because TRL 1.16 sums rewards without weights, and takes whatever a function gives
it: a list of the wrong length would silently train on wrong advantages. The wrapper runs in TRL's
rollout process, which gets it pickled.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from asyncgrpo_engine import named, trl_names
from asyncgrpo_engine.problems import Problem

Reward = Callable[..., Any]
_TRL: Final = "trl"
_LIST = "return a list with a number, or None, for each answer"


class RewardError(Exception):
    """A reward function failed, or gave what cannot be trained on. One text tells all."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One reward function with its weight; called as TRL calls it."""

    name: str
    function: Reward
    weight: float = 1.0

    @property
    def __name__(self) -> str:
        """What TRL logs it as: rewards/NAME."""
        return self.name.partition(":")[2]

    def unweighted(self) -> Scored:
        return replace(self, weight=1.0)

    def __call__(self, *, completions: list[Any], **columns: Any) -> list[float | None]:
        """(answers,), None where there is no score. Raises RewardError."""
        try:
            values = self.function(completions=completions, **columns)
        except Exception as error:  # whatever the user's code raises
            raise self._raised(error) from error
        return self._weighted(values, len(completions))

    def _raised(self, error: Exception) -> RewardError:
        """Where in the user's code, in its own words."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{frame.filename}, line {frame.lineno}"
        return RewardError(f"{self.name} raised {type(error).__name__}: {error} ({at})")

    def _weighted(self, values: Any, answers: int) -> list[float | None]:
        if not isinstance(values, Sequence) and hasattr(values, "tolist"):
            values = values.tolist()  # an array or a tensor
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise self._wrong(f"returned {values!r}", _LIST)
        if len(values) != answers:
            raise self._wrong(f"returned {len(values)} values for {answers} answers", _LIST)
        return [self._one(value, number) for number, value in enumerate(values)]

    def _one(self, value: Any, number: int) -> float | None:
        if value is None:
            return None
        try:
            score = float(value)
        except (TypeError, ValueError) as error:
            raise self._wrong(f"returned {value!r} for answer {number}", _LIST) from error
        if not math.isfinite(score):
            fix = "return None for an answer without a score"
            raise self._wrong(f"returned {score} for answer {number}", fix)
        return score * self.weight

    def _wrong(self, what: str, fix: str) -> RewardError:
        return RewardError(f"{self.name} ({_place(self.function)}) {what}; {fix}")


@dataclass(frozen=True, slots=True)
class ScoredLater(Scored):
    """The same for an async function, which TRL awaits."""

    async def __call__(  # type: ignore[override]
        self, *, completions: list[Any], **columns: Any
    ) -> list[float | None]:
        try:
            values = await self.function(completions=completions, **columns)
        except Exception as error:  # whatever the user's code raises
            raise self._raised(error) from error
        return self._weighted(values, len(completions))


def _place(function: Reward) -> str:
    """File and line of a function, or the file of an object's class."""
    found = function if inspect.isroutine(function) else type(function)
    try:
        file, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (OSError, TypeError):
        return f"in {getattr(found, '__module__', 'an unknown module')}"
    return f"{file}, line {line}"


# --- loading ---------------------------------------------------------------------------------


def load(
    names: Sequence[str], weights: Sequence[float] = (), *, needed: bool = True
) -> tuple[list[Scored], list[Problem]]:
    """The functions named "module:function" or "trl:NAME", and what is wrong with the others.

    `weights` are as many as the names, or none. Without `needed` an environment gives rewards.
    """
    functions: list[Scored] = []
    problems: list[Problem] = []
    if weights and len(weights) != len(names):
        what = f"{len(weights)} weights for {len(names)} rewards"
        fix = "give one for each, in the same order"
        problems.append(Problem(what=what, where="train.reward_weights", fix=fix))
        weights = ()
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        found = _load_one(name)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            kind = ScoredLater if is_async(found) else Scored
            functions.append(kind(name, found, float(weight)))
    if needed and not names:
        problems.append(
            Problem(what="no reward function", where="train.rewards", fix='add "module:function"')
        )
    return functions, problems


def _load_one(name: str) -> Reward | Problem:
    where = f"train.rewards {name!r}"
    module, _, attribute = name.partition(":")
    if module == _TRL:
        return _load_from_trl(attribute, where)
    found = named.load(name, where)
    if inspect.isclass(found):
        return Problem(what="a class, no reward", where=where, fix="name an object of it")
    return found


def _load_from_trl(name: str, where: str) -> Reward | Problem:
    known = trl_names.rewards()
    if name not in known:
        return Problem(
            what=f"TRL has no reward {name!r}",
            where=where,
            fix=f"it has {', '.join(sorted(known))}",
        )
    if name.startswith("get_"):
        return Problem(
            what=f"{name} makes a reward from arguments",
            where=where,
            fix="write a function at module level that calls what it returns",
        )
    if missing := trl_names.missing_for_reward(name):
        fix = f"install {missing} into the engine's Python"
        return Problem(what=f"it needs {missing}", where=where, fix=fix)
    return known[name]


def is_async(function: Reward) -> bool:
    """Whether TRL awaits what calling it gives; a partial counts as what it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - whether it is async, not whether it is
    )


# --- scoring ---------------------------------------------------------------------------------


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
