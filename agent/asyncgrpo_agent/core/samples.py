"""Rollouts that people may read, put together: who answered, and what each reward function gave.

The trainer's agent sees every answer with its replica, the engine-side child tells of some with
their rewards, one function at a time. Both know a rollout by the first tokens of its answer.

Pure: the clock's reading comes with each call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

HEAD_TOKENS: Final = 16  # as in asyncgrpo_engine/sampling.py
MAX_ANSWERS: Final = 4096
MAX_OPEN: Final = 16
MINUTE_S: Final = 60.0
SCORED_S: Final = 10.0  # in which an answer is scored, mostly

Head = tuple[int, ...]


class Answer(NamedTuple):
    """Who answered, by which version, and how long it took.

    Short answers are alike: "" and -1 stand where two that may be meant differ.
    """

    replica: str
    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A whole one. `answer` is None if nobody is known to have given it."""

    prompt: str
    completion: str
    tokens: int
    rewards: Mapping[str, float | None]
    answer: Answer | None


@dataclass(slots=True)
class _Open:
    event: Mapping[str, Any]
    rewards: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class SampleBook:
    """Lets `a_minute` of them through, evenly; the others are dropped."""

    a_minute: int
    _answers: OrderedDict[Head, tuple[float, Answer]] = field(default_factory=OrderedDict)
    _open: OrderedDict[Head, _Open] = field(default_factory=OrderedDict)
    _next_at: float = float("-inf")

    def answered(self, token_ids: list[int], answer: Answer, now_s: float) -> None:
        """An answer; those with the same beginning are told apart by time alone."""
        head = tuple(token_ids[:HEAD_TOKENS])
        at, before = self._answers.pop(head, (-SCORED_S, answer))
        if now_s - at < SCORED_S:
            is_one, is_alike = before.replica == answer.replica, before.version == answer.version
            replica, version = answer.replica if is_one else "", answer.version if is_alike else -1
            answer = Answer(replica, version, answer.seconds)
        self._answers[head] = (now_s, answer)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def scored(self, event: Mapping[str, Any], now_s: float) -> Sample | None:
        """The rollout that is complete with it. KeyError, TypeError or ValueError for no sample."""
        head = tuple(int(token) for token in event["head"])
        found = self._open.get(head)
        if found is None:
            if now_s < self._next_at:
                return None
            self._next_at = max(self._next_at, now_s - MINUTE_S / self.a_minute)
            self._next_at += MINUTE_S / self.a_minute
            found = self._open[head] = _Open(event)
            while len(self._open) > MAX_OPEN:  # a function of theirs failed
                self._open.popitem(last=False)
        value = event["value"]
        found.rewards[str(event["reward"])] = None if value is None else float(value)
        if len(found.rewards) < int(event["functions"]):
            return None
        del self._open[head]
        return Sample(
            prompt=str(found.event["prompt"]),
            completion=str(found.event["completion"]),
            tokens=int(found.event["tokens"]),
            rewards=found.rewards,
            answer=self._answers.get(head, (0.0, None))[1],
        )
