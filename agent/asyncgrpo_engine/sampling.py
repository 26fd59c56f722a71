"""Rollouts for people to read: some that reward functions see are posted to the agent as well.

Only where the job asks for it. Each reward is wrapped; its values, its errors and what TRL calls it
stay as they are. The wrapper runs in TRL's rollout process, which gets it pickled. The agent puts
the rewards of one rollout together, and bounds how many there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncgrpo_engine.events import Events
from asyncgrpo_engine.rewards import Reward, is_async

MAX_CHARACTERS: Final = 4000
HEAD_TOKENS: Final = 16  # by which the agent knows who answered


def wrapped(functions: Any, gateway: str) -> Any:
    """What a trainer takes as `reward_funcs`, each sampled. What is no function stays as it is."""
    if not isinstance(functions, list):
        return functions if functions is None else _wrapped(functions, gateway, 1)
    return [_wrapped(function, gateway, len(functions)) for function in functions]


def _wrapped(function: Any, gateway: str, functions: int) -> Any:
    if not callable(function):
        return function
    kind = SampledLater if is_async(function) else Sampled
    return kind(function, gateway, functions)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reward function, called as TRL calls it."""

    function: Reward
    gateway: str
    functions: int  # that score the same rollouts

    @property
    def __name__(self) -> str:
        found = self.function
        while isinstance(found, functools.partial):
            found = found.func
        return str(getattr(found, "__name__", type(found).__name__))

    def __call__(self, **columns: Any) -> Any:
        values = self.function(**columns)
        self._tell(columns, values)
        return values

    def _tell(self, columns: dict[str, Any], values: Any) -> None:
        ids: Sequence[Sequence[int]] = columns.get("completion_ids") or []
        if not ids or not isinstance(values, Sequence) or len(values) != len(ids):
            return
        one = sum(ids[0][:HEAD_TOKENS]) % len(ids)  # the same for all functions
        score = values[one]
        is_number = isinstance(score, (int, float)) and math.isfinite(score)
        _events(self.gateway).sample(
            {
                "head": list(ids[one][:HEAD_TOKENS]),
                "tokens": len(ids[one]),
                "prompt": text_of(columns["prompts"][one]),
                "completion": text_of(columns["completions"][one]),
                "reward": self.__name__,
                "value": float(score) if is_number else None,
                "functions": self.functions,
            }
        )


@dataclass(frozen=True, slots=True)
class SampledLater(Sampled):
    """The same for an async function, which TRL awaits."""

    async def __call__(self, **columns: Any) -> Any:
        values = await self.function(**columns)
        self._tell(columns, values)
        return values


def text_of(said: Any) -> str:
    """A prompt or a completion as people read it; a long one loses its middle."""
    text = "\n\n".join(map(_message, said)) if isinstance(said, list) else str(said)
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    said = content if isinstance(content, str) else str(content)
    return f"{message.get('role', '?')}: {said}" + (f"\n{calls}" if calls else "")


@functools.cache
def _events(gateway: str) -> Events:
    """One poster for each process."""
    return Events(gateway)
