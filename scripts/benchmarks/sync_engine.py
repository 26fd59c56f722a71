"""The engine of `scripts/bench sync`: FakeVllm with tokens by the clock, and pause and resume.

The replica's agent starts it as vLLM. `--bench-uds PATH` opens a second socket, for the benchmark:
there it reads the counter and does what the reference way does to vLLM. The counter is exact at any
moment, and a busy machine slows no completion down: only what keeps the engine idle or paused does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import trio

from asyncgrpo_agent.net.http1 import Request, Response, json_response
from fakes.adapters import CONFIG, WEIGHTS
from fakes.vllm import FakeVllm

CHUNK_BYTES = 1 << 20


class ClockedVllm(FakeVllm):
    """Each completion makes `rate` tokens a second while it runs and nothing is paused."""

    def __init__(self, *, model: str, max_loras: int, rate: float, load_s: float) -> None:
        super().__init__(model=model, max_loras=max_loras, max_lora_rank=16, load_delay_s=load_s)
        self._rate = rate
        self._counted_at = trio.current_time()
        self._paused = trio.Event()
        self._routes[("POST", "/pause")] = self._pause
        self._routes[("POST", "/resume")] = self._resume

    def _count(self) -> None:
        """Before any change: the tokens since the last one."""
        now = trio.current_time()
        if not self._paused.is_set():
            self.generated_tokens += self.running * self._rate * (now - self._counted_at)
        self._counted_at = now

    async def _spend(self, tokens: int) -> None:
        self._count()
        self.running += 1
        left_s = tokens / self._rate
        try:
            while left_s > 0:
                await self._moving.wait()
                began = trio.current_time()
                with trio.move_on_after(left_s):
                    await self._paused.wait()
                left_s -= trio.current_time() - began
        finally:
            self._count()
            self.running -= 1

    async def _metrics(self, request: Request) -> Response:
        self._count()
        return await super()._metrics(request)

    async def _pause(self, _: Request) -> Response:
        self._count()
        self._moving = trio.Event()
        self._paused.set()
        return json_response(200, {})

    async def _resume(self, _: Request) -> Response:
        self._count()
        self._paused = trio.Event()
        self._moving.set()
        return json_response(200, {})

    async def _is_paused(self, _: Request) -> Response:
        return json_response(200, {"is_paused": self._paused.is_set()})

    async def _load(self, request: Request) -> Response:
        """Reads the whole adapter, as vLLM does, beside the completions."""
        folder = Path(msgspec.json.decode(request.body)["lora_path"])
        await trio.to_thread.run_sync(_read_through, folder)
        return await super()._load(request)

    def _read(self, name: str, path: str) -> str:
        """Whose bytes they are does not matter here, only whether they are there."""
        return name if (Path(path) / CONFIG).exists() else super()._read(name, path)


def _read_through(folder: Path) -> None:
    try:
        for name in (CONFIG, WEIGHTS):
            with (folder / name).open("rb", buffering=0) as file:
                while file.read(CHUNK_BYTES):
                    pass
    except FileNotFoundError:
        return  # it is told by what comes after


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--bench-uds", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-loras", type=int, required=True)
    parser.add_argument("--bench-tokens-per-s", type=float, required=True)
    parser.add_argument("--bench-load-s", type=float, required=True)
    return parser


async def serve(engine: FakeVllm, options: argparse.Namespace) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, options.uds)
        nursery.start_soon(engine.run, options.bench_uds)


async def main() -> None:
    options = flags().parse_known_args()[0]
    engine = ClockedVllm(
        model=options.served_model_name or options.model,
        max_loras=options.max_loras,
        rate=options.bench_tokens_per_s,
        load_s=options.bench_load_s,
    )
    await serve(engine, options)


if __name__ == "__main__":
    trio.run(main)
