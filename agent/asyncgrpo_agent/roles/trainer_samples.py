"""Rollouts that people may read, from the trainer's agent to the proxy; kept nowhere here."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.samples import Answer, Sample, SampleBook
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Body(msgspec.Struct):
    choices: list[_Choice]


_BODY = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class RolloutSamples:
    """Of one trainer. `a_minute` of 0 is none, and costs nothing."""

    a_minute: int
    tell: Callable[[m.Sampled], Awaitable[None]]
    _book: SampleBook = field(init=False)
    _queue: trio.MemorySendChannel[m.Sampled] = field(init=False)
    _out: trio.MemoryReceiveChannel[m.Sampled] = field(init=False)

    def __post_init__(self) -> None:
        self._book = SampleBook(max(1, self.a_minute))
        self._queue, self._out = trio.open_memory_channel[m.Sampled](64)

    async def run(self) -> None:
        """Send what is whole, for ever."""
        async for sampled in self._out:
            await self.tell(sampled)

    def answered(self, rollout: m.Rollout, answer: CompletedRollout, seconds: float) -> None:
        """The fleet has answered a rollout."""
        if not self.a_minute or answer.status != 200:
            return
        try:
            (choice,) = _BODY.decode(answer.body).choices
        except (
            msgspec.MsgspecError,
            RecursionError,
            ValueError,
        ):  # without token ids, or several answers
            return
        parts = parse_name(rollout.model)
        version = -1 if parts is None else parts.version
        answered = Answer(answer.replica, version, seconds)
        self._book.answered(choice.token_ids, answered, trio.current_time())

    def scored(self, event: Mapping[str, Any]) -> None:
        """The engine-side child tells of one, with what one reward function gave."""
        if not self.a_minute:
            return
        try:
            sample = self._book.scored(event, trio.current_time())
        except (KeyError, TypeError, ValueError) as error:
            log.debug("sample.unread", reason=f"{type(error).__name__}: {error}")
            return
        if sample is None:
            return
        try:
            self._queue.send_nowait(m.Sampled(_sampled(sample)))
        except trio.WouldBlock:  # the proxy is away: those who look on miss it
            log.debug("sample.dropped")


def _sampled(sample: Sample) -> m.SampledRollout:
    answer = sample.answer or Answer("", -1, 0.0)
    return m.SampledRollout(
        t_unix_s=round(time.time(), 3),  # noqa: TID251 - a role reads the clock
        prompt=sample.prompt,
        completion=sample.completion,
        tokens=sample.tokens,
        rewards=dict(sample.rewards),
        version=answer.version,
        replica=answer.replica,
        seconds=round(answer.seconds, 3),
    )
