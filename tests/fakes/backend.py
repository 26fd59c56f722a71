"""FakeBackend: a run behind the gateway, in memory, with every call recorded."""

from __future__ import annotations

import json
from typing import Any

import trio

from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.wire import messages

ENGINE = messages.EngineFacts(
    base_model="Qwen/tiny",
    model_digest="d1",
    dtype="torch.float32",
    max_model_len=512,
    max_loras=8,
    max_lora_rank=16,
    vllm_version="0.31.0",
)


def fleet_of(ready: int, *, engine: messages.EngineFacts | None = ENGINE) -> messages.Fleet:
    return messages.Fleet(ready=ready, registered=2, capacity=8, engine=engine, replicas=[])


class FakeBackend:
    """Answers completions as vLLM words them, naming the physical adapter."""

    def __init__(self) -> None:
        self.now_fleet: messages.Fleet | None = fleet_of(1)
        self.names: dict[str, str] = {}  # TRL name -> physical name
        self.published: list[tuple[str, str]] = []
        self.retired: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.rollouts: list[tuple[messages.Rollout, dict[str, Any]]] = []
        self.publish_error: AgentError | None = None
        self.complete_error: AgentError | None = None
        self.answer: CompletedRollout | None = None
        self.latency_s = 0.0
        self.cancelled = 0

    def fleet(self) -> messages.Fleet | None:
        return self.now_fleet

    def base_model(self) -> str:
        return ENGINE.base_model

    async def publish(self, trl_name: str, local_path: str) -> None:
        if self.publish_error is not None:
            raise self.publish_error
        self.published.append((trl_name, local_path))
        self.names[trl_name] = f"run.a0003-7f3c.{trl_name}.9f"

    async def retire(self, trl_name: str) -> None:
        self.retired.append(trl_name)
        self.names.pop(trl_name, None)

    def physical_name(self, trl_name: str) -> str | None:
        return self.names.get(trl_name)

    async def complete(self, rollout: messages.Rollout, body: bytes) -> CompletedRollout:
        self.rollouts.append((rollout, json.loads(body)))
        try:
            await trio.sleep(self.latency_s)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.complete_error is not None:
            raise self.complete_error
        return self.answer or _completed(rollout.model, json.loads(body))

    def observe(self, event: dict[str, Any]) -> None:
        self.events.append(event)


def _completed(model: str, body: dict[str, Any]) -> CompletedRollout:
    ids = list(range(body.get("max_tokens", 16)))
    choice = {
        "index": 0,
        "text": "",
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
    }
    answer = {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice]}
    return CompletedRollout(
        status=200, content_type="application/json", body=json.dumps(answer).encode()
    )
