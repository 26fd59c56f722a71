"""The engine of `scripts/bench run`: that of `scripts/bench quorum`, with answers of many lengths.

Each completion has a length of its own, drawn from its seed between `--bench-min-share` of
`max_tokens` and all of it. `GET /bench` tells also the port at which TRL can reach the engine
without agents, as it reaches a vLLM server of its own.
"""

from __future__ import annotations

from random import Random
from typing import Any

import trio
from shared_engine import SharedVllm, parse
from sync_engine import serve

from asyncgrpo_agent.net import http1


class TrlVllm(SharedVllm):
    """An engine for real TRL."""

    def __init__(self, *, min_share: float, **options: Any) -> None:
        super().__init__(**options)
        self._min_share = min_share
        self._port = 0

    async def run_open(self) -> None:
        """Serve on a TCP port of this host as well."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._port = listeners[0].socket.getsockname()[1]
        await http1.serve(listeners, self.handle, hop="vllm")

    async def _generate(
        self, body: dict[str, Any], prompt: list[int]
    ) -> tuple[list[int], list[float], str]:
        most = body["max_tokens"]
        drawn = Random(body.get("seed")).randint(round(most * self._min_share), most)
        return await super()._generate({**body, "max_tokens": drawn}, prompt)

    def seen(self) -> dict[str, float]:
        return {**super().seen(), "port": self._port}


async def main() -> None:
    options = parse("--bench-min-share")
    engine = TrlVllm(
        model=options.served_model_name or options.model,
        max_loras=options.max_loras,
        rate=options.bench_tokens_per_s,
        most=options.bench_most_tokens_per_s,
        load_s=options.bench_load_s,
        min_share=options.bench_min_share,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.pace)
        nursery.start_soon(engine.run_open)
        nursery.start_soon(serve, engine, options)


if __name__ == "__main__":
    trio.run(main)
