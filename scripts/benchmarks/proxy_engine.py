"""The engine of `scripts/bench proxy`: as much of vLLM's server as agents use, as cheap as it gets.

The replica's agent starts it as vLLM. `--bench-port N` opens a second listener on loopback: there
the baseline sends completions, and the benchmark reads `/bench`. A completion takes the seconds
that its body names in `bench_s`; its answer has the shape and the size of vLLM's with
log-probabilities, and is made beforehand but for the model and the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from typing import Any

from fakes.vllm_answers import logprobs_of, model_card, words

TOKENS = 32  # of an answer
TOKENS_PER_S = 100.0  # of one completion, as the counter shows them
SECONDS = re.compile(rb'"bench_s":\s*([0-9.]+)')
MODEL = re.compile(rb'"model":\s*("[^"]*")')
PROMPT = re.compile(rb'"prompt":\s*(\[[^\]]*\])')
LENGTH = re.compile(rb"(?i)\r\ncontent-length:\s*(\d+)")


class Engine:
    """What all connections share, and what the benchmark asks for."""

    def __init__(self, model: str, max_loras: int) -> None:
        self.model = model
        self.max_loras = max_loras
        self.adapters: dict[str, str] = {}
        self.requests = self.hits = self.running = 0
        self._prompts: set[int] = set()  # the prefix cache
        self._running_s = 0.0  # of all completions so far
        self._generated = 0.0
        self._at = asyncio.get_running_loop().time()
        self._answers = {tokens: answer_parts(tokens) for tokens in (1, TOKENS)}

    def begin(self, prompt: bytes) -> None:
        self._move(+1)
        self.requests += 1
        self.hits += hash(prompt) in self._prompts
        self._prompts.add(hash(prompt))

    def finish(self) -> None:
        self._move(-1)
        self._generated += TOKENS

    def answer(self, model: bytes, prompt: bytes, tokens: int) -> bytes:
        before, between, after = self._answers[tokens]
        return b"".join((before, model, between, prompt, after))

    def _move(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self._running_s += self.running * (now - self._at)
        self._at = now
        self.running += change

    # --- everything but completions ------------------------------------------------------------

    def control(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The answer to agents and to the benchmark: text or something for JSON."""
        match method, path:
            case "GET", "/health":
                return 200, ""
            case "GET", "/version":
                return 200, {"version": "0.31.0"}
            case "GET", "/is_paused":
                return 200, {"is_paused": False}
            case "GET", "/v1/models":
                return 200, {"object": "list", "data": self._models()}
            case "GET", "/server_info":
                return 200, {"vllm_config": self._config(), "system_env": {}}
            case "GET", "/metrics":
                return 200, self._metrics()
            case "GET", "/bench":
                self._move(0)
                return 200, {
                    "requests": self.requests,
                    "hits": self.hits,
                    "running_s": self._running_s,
                    "at": self._at,
                }
            case "POST", "/v1/load_lora_adapter":
                load = json.loads(body)
                self.adapters[load["lora_name"]] = load["lora_path"]
                return 200, f"Success: LoRA adapter '{load['lora_name']}' added successfully."
            case "POST", "/v1/unload_lora_adapter":
                self.adapters.pop(json.loads(body)["lora_name"], None)
                return 200, "Success"
        return 404, {"detail": "Not Found"}

    def _models(self) -> list[dict[str, Any]]:
        rows = [model_card(self.model, root=self.model, parent=None, length=32_768)]
        return rows + [
            model_card(name, root=path, parent=self.model, length=None)
            for name, path in self.adapters.items()
        ]

    def _config(self) -> dict[str, Any]:
        return {
            "model_config": {
                "model": self.model,
                "dtype": "torch.float32",
                "max_model_len": 32_768,
                "served_model_name": self.model,
            },
            "lora_config": {"max_loras": self.max_loras, "max_lora_rank": 16},
            "parallel_config": {
                "data_parallel_size": 1,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "world_size": 1,
            },
        }

    def _metrics(self) -> str:
        self._move(0)
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.5,
            "generation_tokens_total": int(self._generated + self._running_s * TOKENS_PER_S),
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


def answer_parts(tokens: int) -> list[bytes]:
    """An answer around the JSON of the model and of the prompt."""
    ids = [(7_919 * number) % 150_000 for number in range(tokens)]
    logprobs = [-1.0 / (3 + number) for number in range(tokens)]
    choice = {
        "index": 0,
        "text": words(ids),
        "logprobs": logprobs_of(ids, logprobs),
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": "PROMPT",
    }
    answer = {
        "id": "cmpl-6d1f7c1e8d7c4b559a341d6a1d1f3f10",
        "object": "text_completion",
        "created": 1_796_189_555,
        "model": "MODEL",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": 550, "total_tokens": 582, "completion_tokens": 32},
    }
    return [part.encode() for part in re.split('"MODEL"|"PROMPT"', json.dumps(answer))]


# --- HTTP ------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One request after the other; a completion is given up when the connection goes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end])
        length = LENGTH.search(head)
        end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._received) >= end:
            body = bytes(self._received[head_end + 4 : end])
            del self._received[:end]
            self._serve(head, body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._engine.finish()

    def _serve(self, head: bytes, body: bytes) -> None:
        method, target = head.split(b" ", 2)[:2]
        if method == b"POST" and target == b"/v1/completions":
            self._complete(body)
            return
        path = target.decode().partition("?")[0]
        status, value = self._engine.control(method.decode(), path, body)
        content = value if isinstance(value, str) else json.dumps(value)
        self._send(status, content.encode())

    def _complete(self, body: bytes) -> None:
        prompt, model, seconds = (part.search(body) for part in (PROMPT, MODEL, SECONDS))
        assert prompt is not None
        assert model is not None
        tokens = 1 if re.search(rb'"max_tokens":\s*1\b', body) else TOKENS
        answer = self._engine.answer(model[1], prompt[1], tokens)
        self._engine.begin(prompt[1])
        if seconds is not None and (wait_s := float(seconds[1])) > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._finish, answer)
        else:
            self._finish(answer)

    def _finish(self, answer: bytes) -> None:
        self._timer = None
        self._engine.finish()
        self._send(200, answer)

    def _send(self, status: int, content: bytes) -> None:
        head = b"HTTP/1.1 %d OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n" % status
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(content) + content)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds")
    parser.add_argument("--bench-port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-loras", type=int, default=8)
    return parser.parse_known_args(sys.argv[1:])[0]


async def main() -> None:
    options = parse()
    engine = Engine(options.served_model_name or options.model, options.max_loras)
    loop = asyncio.get_running_loop()

    def connect() -> Connection:
        return Connection(engine)

    await loop.create_server(connect, "127.0.0.1", options.bench_port, backlog=4096)
    if options.uds:
        await loop.create_unix_server(connect, options.uds, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
