"""FakeVllm: as much of vLLM's HTTP server as agents use, without a model.

Tokens follow from the loaded adapter's bytes, the seed and the prompt, so two replicas that hold
the same bytes answer alike, and answers are signed with the digest of those bytes. What is claimed
here about vLLM is checked against the real one by tests/net/test_engine_contract.py.

Also a program that can stand in for `vllm.entrypoints.openai.api_server`; it takes vLLM's flags and
ignores those it has no use for: `python -m fakes.vllm --uds PATH --model DIR ...`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import trio
from trio import socket

from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.http1 import Request, Response, json_response
from fakes.adapters import BrokenAdapterError, NoAdapterError, has_effect, load
from fakes.vllm_answers import failure, logprobs_of, model_card, text_response, words

VOCABULARY = 320
BASE_DIGEST = "base"
_STEP_S = 0.02  # how often a paced completion makes progress, at most


class _StatusError(Exception):
    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class FakeVllm:
    """One engine. Knobs may be turned while it serves."""

    def __init__(
        self,
        *,
        model: str = "/models/tiny",
        max_model_len: int = 512,
        max_loras: int = 6,
        max_lora_rank: int = 8,
        max_cpu_loras: int | None = None,
        dtype: str = "torch.float32",
        logprobs_mode: str = "processed_logprobs",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        tokens_per_s: float | None = None,
        load_delay_s: float = 0.0,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.max_loras = max_loras
        self.max_lora_rank = max_lora_rank
        self.max_cpu_loras = max_cpu_loras or max_loras
        self.dtype = dtype
        self.logprobs_mode = logprobs_mode
        self.quantization = quantization
        self.kv_cache_dtype = kv_cache_dtype
        self.tokens_per_s = tokens_per_s  # of one completion; None: at once
        self.load_delay_s = load_delay_s
        self.fail_with: int | None = None  # the status of every completion
        self.fail_words = "told to fail"
        self.adapters: dict[str, str] = {}  # name -> path
        self.running = 0
        self.completed = 0
        self.cancelled = 0
        self.generated_tokens = 0
        self.answered: list[str] = []  # the model of every completion, in order
        self.dead = False
        self._resident: OrderedDict[str, str] = OrderedDict()  # name -> digest, in vLLM's slots
        self._moving = trio.Event()
        self._moving.set()
        self._numbers = count(1)
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/is_paused"): self._is_paused,
            ("GET", "/get_world_size"): self._world_size,
            ("GET", "/v1/models"): self._models,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
        }

    # --- knobs -------------------------------------------------------------------------------

    def hang(self) -> None:
        """Completions stop making progress; health and metrics go on, as with a hung GPU."""
        self._moving = trio.Event()

    def release(self) -> None:
        self._moving.set()

    def lose_adapters(self) -> None:
        """What a restart does."""
        self.adapters.clear()
        self._resident.clear()

    # --- serving -----------------------------------------------------------------------------

    async def run(
        self,
        socket_path: Path | str,
        *,
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on a Unix socket until cancelled.

        As with vLLM the path must be free, and the socket file stays behind.
        """
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await server.bind(str(socket_path))
        server.listen(1024)
        listeners = [trio.SocketListener(server)]
        await http1.serve(listeners, self.handle, hop="vllm", task_status=task_status)

    async def handle(self, request: Request) -> Response:
        route = self._routes.get((request.method, request.path))
        if route is None:
            return json_response(404, {"detail": "Not Found"})
        try:
            return await route(request)
        except _StatusError as error:
            return failure(error.status, str(error), error.kind)

    # --- state -------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        return Response(status=503 if self.dead else 200, content_type="text/plain", body=b"")

    async def _is_paused(self, _: Request) -> Response:
        return json_response(200, {"is_paused": False})

    async def _version(self, _: Request) -> Response:
        return json_response(200, {"version": "0.31.0"})

    async def _world_size(self, _: Request) -> Response:
        return json_response(200, {"world_size": 1})

    async def _models(self, _: Request) -> Response:
        rows = [model_card(self.model, root=self.model, parent=None, length=self.max_model_len)]
        rows += [
            model_card(name, root=path, parent=self.model, length=None)
            for name, path in self.adapters.items()
        ]
        return json_response(200, {"object": "list", "data": rows})

    async def _server_info(self, request: Request) -> Response:
        config: Any = {
            "model_config": {
                "model": self.model,
                "dtype": self.dtype,
                "max_model_len": self.max_model_len,
                "served_model_name": self.model,
                "logprobs_mode": self.logprobs_mode,
                "quantization": self.quantization,
            },
            "lora_config": {
                "max_loras": self.max_loras,
                "max_lora_rank": self.max_lora_rank,
                "max_cpu_loras": self.max_cpu_loras,
            },
            "cache_config": {"cache_dtype": self.kv_cache_dtype},
            "parallel_config": {
                "_api_process_count": 1,
                "data_parallel_size": 1,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "world_size": 1,
            },
        }
        if request.query.get("config_format", "text") != "json":
            config = str(config)
        environment = {"vllm_version": "0.31.0"}
        info = {"vllm_config": config, "vllm_env": {}, "system_env": environment}
        return json_response(200, info)

    async def _metrics(self, _: Request) -> Response:
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": min(1.0, self.running / 100),
            "vllm:generation_tokens_total": self.generated_tokens,
            "vllm:generation_tokens_created": 1.796189555264122e09,
        }
        labels = f'{{engine="0",model_name="{self.model}"}}'
        lines = [f"{name}{labels} {float(value)}" for name, value in values.items()]
        text = "# HELP vllm:num_requests_running Number of requests.\n" + "\n".join(lines) + "\n"
        return Response(
            status=200,
            content_type="text/plain; version=1.0.0; charset=utf-8",
            body=text.encode(),
        )

    # --- adapters ----------------------------------------------------------------------------

    async def _load(self, request: Request) -> Response:
        body = _json(request.body)
        for field in ("lora_name", "lora_path"):
            if field not in body:
                raise _StatusError(400, f"body.{field}: Field required", "Bad Request")
        name, path = body["lora_name"], body["lora_path"]
        if not name or not path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise _StatusError(400, message, "InvalidUserInput")
        if name == self.model:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            raise _StatusError(400, message, "InvalidUserInput")
        if name in self.adapters and not body.get("load_inplace", False):
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
            raise _StatusError(400, message, "InvalidUserInput")
        await trio.sleep(self.load_delay_s)
        self._place(name, self._read(name, path))
        self.adapters[name] = path
        return text_response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = _json(request.body).get("lora_name", "")
        if name not in self.adapters:
            message = f"The lora adapter '{name}' cannot be found."
            raise _StatusError(404, message, "NotFoundError")
        del self.adapters[name]  # its slot stays taken until it is evicted
        return text_response(f"Success: LoRA adapter '{name}' removed successfully.")

    def _read(self, name: str, path: str) -> str:
        try:
            return load(Path(path), max_rank=self.max_lora_rank)
        except NoAdapterError as error:
            message = f"Loading lora {name} failed: No adapter found for <path>"
            raise _StatusError(404, message, "NotFoundError") from error
        except BrokenAdapterError as error:
            message = f"Call to add_lora method failed: Worker failed with error '{error}'"
            raise _StatusError(500, message, "InternalServerError") from error

    def _place(self, name: str, digest: str) -> None:
        self._resident[name] = digest
        self._resident.move_to_end(name)
        while len(self._resident) > self.max_loras:
            self._resident.popitem(last=False)

    def _digest(self, model: str) -> str:
        """The bytes behind `model`. An evicted adapter is read again, and must still be there."""
        if model == self.model:
            return BASE_DIGEST
        if model not in self.adapters:
            raise _StatusError(404, f"The model `{model}` does not exist.", "NotFoundError")
        if model not in self._resident:
            try:
                self._place(model, self._read(model, self.adapters[model]))
            except _StatusError:
                self.dead = True
        self._check_alive()
        self._resident.move_to_end(model)
        return self._resident[model]

    def _check_alive(self) -> None:
        if self.dead:
            raise _StatusError(500, "EngineCore encountered an issue.", "InternalServerError")

    # --- completions -------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        body = _json(request.body)
        prompt = body.get("prompt", [])
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        ids, logprobs, digest = await self._generate(body, tokens)
        wants_ids = body.get("return_token_ids", False)
        choice = {
            "index": 0,
            "text": words(ids),
            "logprobs": logprobs_of(ids, logprobs) if body.get("logprobs") is not None else None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": ids if wants_ids else None,
            "prompt_logprobs": self._scores(body, tokens, digest),
            "prompt_token_ids": tokens if wants_ids else None,
        }
        return self._answer("text_completion", body, choice, len(tokens), len(ids), digest)

    def _scores(
        self, body: dict[str, Any], prompt: list[int], digest: str
    ) -> list[dict[str, Any] | None] | None:
        if body.get("prompt_logprobs") is None:
            return None
        folder = self.adapters.get(body.get("model", ""))
        whose = digest if folder is None or has_effect(Path(folder)) else BASE_DIGEST
        source = Random(f"{whose} {prompt}")
        scored = [
            {"logprob": -source.uniform(0.01, 6.0), "rank": 1, "decoded_token": ""} for _ in prompt
        ]
        return [None, *({str(t): row} for t, row in zip(prompt[1:], scored, strict=False))]

    async def _chat(self, request: Request) -> Response:
        body = _json(request.body)
        tokens = list(msgspec.json.encode(body.get("messages", [])))
        ids, _, digest = await self._generate(body, tokens)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": words(ids)},
            "finish_reason": "length",
        }
        return self._answer("chat.completion", body, choice, len(tokens), len(ids), digest)

    async def _generate(
        self, body: dict[str, Any], prompt: list[int]
    ) -> tuple[list[int], list[float], str]:
        self._check_alive()
        if self.fail_with is not None:
            raise _StatusError(self.fail_with, self.fail_words, "InternalServerError")
        # As vLLM does: a request without a model is the base model's.
        digest = self._digest(body.get("model") or self.model)
        wanted = body.get("max_tokens", 16)
        if len(prompt) + wanted > self.max_model_len:
            message = f"max_tokens={wanted} exceeds max_model_len={self.max_model_len}."
            raise _StatusError(400, message, "BadRequestError")
        await self._spend(wanted)
        seed = body.get("seed")
        source = Random(f"{digest} {next(self._numbers) if seed is None else seed} {prompt}")
        ids = [source.randrange(VOCABULARY) for _ in range(wanted)]
        return ids, [-source.uniform(0.01, 6.0) for _ in ids], digest

    async def _spend(self, tokens: int) -> None:
        """The time of a generation, with its tokens showing up in the counters on the way."""
        self.running += 1
        done = 0
        try:
            while done < tokens:
                await self._moving.wait()
                step = tokens - done
                if self.tokens_per_s is not None:
                    step = min(step, max(1, round(self.tokens_per_s * _STEP_S)))
                    await trio.sleep(step / self.tokens_per_s)
                done += step
                self.generated_tokens += step
            self.completed += 1
        except trio.Cancelled:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _answer(
        self,
        kind: str,
        body: dict[str, Any],
        choice: dict[str, Any],
        prompt_tokens: int,
        completion_tokens: int,
        digest: str,
    ) -> Response:
        model = body.get("model") or self.model
        self.answered.append(model)
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        value = {
            "id": f"cmpl-{next(self._numbers):016x}",
            "object": kind,
            "created": 0,
            "model": model,
            "choices": [choice],
            "system_fingerprint": digest,
            "usage": usage,
        }
        return json_response(200, value)


def _json(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise _StatusError(400, f"1 validation error: {error}", "Bad Request") from error


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-loras", type=int, default=6)
    parser.add_argument("--max-lora-rank", type=int, default=8)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--fake-tokens-per-s", type=float)
    parser.add_argument("--fake-load-delay-s", type=float, default=0.0)
    parser.add_argument("--fake-start-delay-s", type=float, default=0.0)
    return parser.parse_known_args(argv)[0]


async def main(argv: list[str], kind: type[FakeVllm] = FakeVllm) -> None:
    flags = _parse(argv)
    fake = kind(
        model=flags.served_model_name or flags.model,
        max_model_len=flags.max_model_len,
        max_loras=flags.max_loras,
        max_lora_rank=flags.max_lora_rank,
        max_cpu_loras=flags.max_cpu_loras,
        logprobs_mode=flags.logprobs_mode,
        quantization=flags.quantization,
        kv_cache_dtype=flags.kv_cache_dtype,
        dtype=f"torch.{flags.dtype}",
        tokens_per_s=flags.fake_tokens_per_s,
        load_delay_s=flags.fake_load_delay_s,
    )
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve_after, flags.fake_start_delay_s, fake, flags.uds)
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


async def _serve_after(delay_s: float, fake: FakeVllm, socket_path: str) -> None:
    await trio.sleep(delay_s)
    await fake.run(socket_path)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
