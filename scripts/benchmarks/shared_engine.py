"""The engine of `scripts/bench quorum`, and of `run`: that of `sync` whose completions share it.

A completion that runs beside n - 1 others makes 1 / (1 / alone + n / most) tokens a second, `alone`
being the rate of a lone completion and `most` what the whole engine never quite reaches: a decoding
step has a fixed cost and one for each sequence. All follows from the clock, so a busy machine slows
no completion down. `GET /bench` on the benchmark's socket tells what was done, `POST /bench` how
long loads take from now on.
"""

from __future__ import annotations

import argparse
import heapq
import math
from itertools import count

import msgspec
import trio
from sync_engine import ClockedVllm, flags, serve

from asyncgrpo_agent.net.http1 import Request, Response, json_response

NEARLY_S = 1e-6  # a completion that has so little left is done


class SharedVllm(ClockedVllm):
    """All completions advance alike, so one number says how far: the tokens each has made."""

    def __init__(self, *, model: str, max_loras: int, rate: float, most: float, load_s: float):
        super().__init__(model=model, max_loras=max_loras, rate=rate, load_s=load_s)
        self._most = most
        self._reached = 0.0
        self._ends: list[tuple[float, int, trio.Event]] = []  # `_reached` when each is done
        self._order = count()
        self._changed = trio.Event()
        self._paused_s = 0.0
        self._idle_s = 0.0
        self._routes[("GET", "/bench")] = self._tell
        self._routes[("POST", "/bench")] = self._obey

    async def pace(self) -> None:
        """For ever: wakes each completion when it is done."""
        while True:
            self._count()
            self._changed = trio.Event()
            speed = self._speed()
            while self._ends and self._ends[0][0] - self._reached <= speed * NEARLY_S:
                heapq.heappop(self._ends)[2].set()
            left = self._ends[0][0] - self._reached if self._ends else math.inf
            with trio.move_on_after(left / speed if speed else math.inf):
                await self._changed.wait()

    def _speed(self) -> float:
        """Tokens a second of each completion."""
        if self._paused.is_set():
            return 0.0
        return 1 / (1 / self._rate + self.running / self._most)

    def _count(self) -> None:
        now = trio.current_time()
        past_s = now - self._counted_at
        self._counted_at = now
        made = past_s * self._speed()
        self._reached += made
        self.generated_tokens += made * self.running
        self._paused_s += past_s * self._paused.is_set()
        self._idle_s += past_s * (not self.running)

    async def _spend(self, tokens: int) -> None:
        done = trio.Event()
        self._count()
        self.running += 1
        heapq.heappush(self._ends, (self._reached + tokens, next(self._order), done))
        self._changed.set()
        try:
            await done.wait()
        finally:
            self._count()
            self.running -= 1
            self._changed.set()

    async def _pause(self, request: Request) -> Response:
        answer = await super()._pause(request)
        self._changed.set()
        return answer

    async def _resume(self, request: Request) -> Response:
        answer = await super()._resume(request)
        self._changed.set()
        return answer

    async def _tell(self, _: Request) -> Response:
        return json_response(200, self.seen())

    def seen(self) -> dict[str, float]:
        """What was done by now."""
        self._count()
        return {
            "tokens": self.generated_tokens,
            "running": self.running,
            "clock_s": self._counted_at,
            "paused_s": self._paused_s,
            "idle_s": self._idle_s,
        }

    async def _obey(self, request: Request) -> Response:
        self.load_delay_s = msgspec.json.decode(request.body)["load_s"]
        return json_response(200, {})


def parse(*more: str) -> argparse.Namespace:
    parser = flags()
    for name in ("--bench-most-tokens-per-s", *more):
        parser.add_argument(name, type=float, required=True)
    return parser.parse_known_args()[0]


async def main() -> None:
    options = parse()
    engine = SharedVllm(
        model=options.served_model_name or options.model,
        max_loras=options.max_loras,
        rate=options.bench_tokens_per_s,
        most=options.bench_most_tokens_per_s,
        load_s=options.bench_load_s,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.pace)
        nursery.start_soon(serve, engine, options)


if __name__ == "__main__":
    trio.run(main)
