"""The engine of `scripts/chaos`: FakeVllm that can be made to hang, lie and forget while it serves.

The replica's agent starts it as vLLM. `--chaos-uds PATH` opens a second socket, on which `POST
/chaos` sets what it does wrong from now on. Each adapter that it takes is a line of `--chaos-log`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import trio

from asyncgrpo_agent.net.http1 import Request, Response, json_response
from fakes.vllm import FakeVllm
from fakes.vllm_answers import text_response


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with it. `forget` happens once, the others last."""

    hang: bool = False
    lie: bool = False
    forget: bool = False


class ChaosVllm(FakeVllm):
    def __init__(self, *, model: str, max_loras: int, rate: float, load_s: float, log: Path):
        super().__init__(model=model, max_loras=max_loras, tokens_per_s=rate, load_delay_s=load_s)
        self._log = log
        self._lies = False
        self._routes[("POST", "/chaos")] = self._obey

    async def _obey(self, request: Request) -> Response:
        knobs = msgspec.json.decode(request.body, type=Knobs)
        if knobs.hang:
            self.hang()
        else:
            self.release()
        self._lies = knobs.lie
        if knobs.forget:
            self.lose_adapters()
        return json_response(200, {"running": self.running})

    async def _load(self, request: Request) -> Response:
        if self._lies:
            return text_response("Success: LoRA adapter added successfully.")
        answer = await super()._load(request)
        name = msgspec.json.decode(request.body)["lora_name"]
        with self._log.open("a") as file:
            file.write(json.dumps({"t": time.time(), "loaded": name}) + "\n")
        return answer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--chaos-uds", type=Path, required=True)
    parser.add_argument("--chaos-log", type=Path, required=True)
    parser.add_argument("--chaos-tokens-per-s", type=float, required=True)
    parser.add_argument("--chaos-load-s", type=float, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-loras", type=int, required=True)
    return parser.parse_known_args()[0]


async def main() -> None:
    options = parse()
    engine = ChaosVllm(
        model=options.served_model_name or options.model,
        max_loras=options.max_loras,
        rate=options.chaos_tokens_per_s,
        load_s=options.chaos_load_s,
        log=options.chaos_log,
    )
    options.chaos_uds.unlink(missing_ok=True)  # of a life before this one
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, options.uds)
        nursery.start_soon(engine.run, options.chaos_uds)


if __name__ == "__main__":
    trio.run(main)
