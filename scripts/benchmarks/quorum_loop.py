"""TRL's loop as `scripts/bench quorum` drives it: `trl.experimental.async_grpo`, without a model.

The rollout worker keeps a number of rollouts in flight. A group of eight has the version at which
its first was sent, each request names the newest version at its own time, and a group is scored
when all eight are there. The trainer takes samples from a queue, drops those that are more than
`STALENESS` versions behind, trains on a batch, and syncs after every step. A failed completion is
sent again, as TRL does, but counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import trio
from quorum_shape import GROUP, Shape
from quorum_ways import FIRST, Way
from sync_trl import MAX_TOKENS, MIN_TOKENS, PROMPT_TOKENS, STALENESS

QUEUE = 1024  # TRL's `queue_maxsize`
AGAIN_S = 1.0  # TRL's first pause before it sends a request again


@dataclass
class Step:
    """One step of the trainer. Seconds are trio's."""

    waited_s: float = 0.0  # for samples
    discarded: int = 0
    staleness: list[int] = field(default_factory=list)  # of each sample that was trained on
    sync_s: float = 0.0
    ended_at: float = 0.0  # after the sync


@dataclass
class _Group:
    version: int
    prompt: list[int]
    done: int = 0


@dataclass
class Loop:
    """One run."""

    way: Way
    shape: Shape
    steps: list[Step] = field(default_factory=list)
    failed: int = 0  # completions
    version: int = FIRST - 1
    _random: Random = field(default_factory=lambda: Random(1))
    _stepped: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self._into_queue, self._queue = trio.open_memory_channel[int](QUEUE)

    async def run(self) -> None:
        """For ever."""
        await self._sync()
        rows = self._rows()
        async with trio.open_nursery() as nursery:
            for number in range(self.shape.in_flight):
                nursery.start_soon(self._roll_out, rows, number / self.shape.in_flight)
            nursery.start_soon(self._train)

    async def step_done(self) -> None:
        """The end of the step that is under way, with its sync."""
        await self._stepped.wait()

    # --- the rollout worker ------------------------------------------------------------------

    def _rows(self) -> Iterator[_Group]:
        """Endless: each group as often as it has members."""
        while True:
            prompt = [self._random.randrange(300) for _ in range(PROMPT_TOKENS)]
            yield from itertools.repeat(_Group(self.version, prompt), GROUP)

    async def _roll_out(self, rows: Iterator[_Group], place: float) -> None:
        """One after the other. They begin spread out, as they are once a run has gone on."""
        await trio.sleep(place * self.shape.rollout_s)
        while True:
            group = next(rows)
            body = {
                "prompt": group.prompt,
                "max_tokens": self._random.randint(MIN_TOKENS, MAX_TOKENS),
                "return_token_ids": True,
                "logprobs": 0,
                "seed": self._random.getrandbits(63),
            }
            while not await self.way.complete(self.version, body):
                self.failed += 1
                await trio.sleep(AGAIN_S)
            group.done += 1
            if group.done == GROUP:
                for _ in range(GROUP):
                    await self._into_queue.send(group.version)

    # --- the trainer -------------------------------------------------------------------------

    async def _train(self) -> None:
        while True:
            step = Step()
            for _ in range(self.shape.batch):
                step.staleness.append(await self._take(step))
            await trio.sleep(self.shape.train_s)
            step.sync_s = await self._sync()
            step.ended_at = trio.current_time()
            self.steps.append(step)
            self._stepped.set()
            self._stepped = trio.Event()

    async def _take(self, step: Step) -> int:
        """The staleness of the next sample that is fresh enough."""
        while True:
            began = trio.current_time()
            staleness = self.version - await self._queue.receive()
            step.waited_s += trio.current_time() - began
            if staleness <= STALENESS:
                return staleness
            step.discarded += 1

    async def _sync(self) -> float:
        """The seconds that it took."""
        began = trio.current_time()
        await self.way.sync(self.version + 1)
        self.version += 1
        return trio.current_time() - began
