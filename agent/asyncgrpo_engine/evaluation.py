"""How often the policy is right: answers sampled through the gateway, scored by the first reward.

The same prompts and the same seeds every time, so two results differ by the policy alone.
Prompts and answers take the same way as in TRL's rollouts: token ids in, token ids out, messages to
the reward.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from asyncgrpo_engine import rewards, trl_names

CONCURRENCY: Final = 16
_TRIES: Final = 4
_PAUSE_S: Final = 1.0
_COLUMNS_OF_TRL: Final = frozenset({"prompt", "completion", "completion_ids"})
_LOW_PRIORITY: Final = {"X-Agrpo-Priority": "low"}  # all rollouts that wait go first
_LOCAL: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EvaluationError(Exception):
    """An answer could not be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are sampled; TRL's values for its rollouts."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    timeout_s: float
    chat_template_kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, args: Any, max_tokens: int) -> Sampling:
        """The values of an AsyncGRPOConfig; `max_tokens` 0 takes its completion length."""
        return cls(
            max_tokens=max_tokens or args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            timeout_s=args.request_timeout,
            chat_template_kwargs=args.chat_template_kwargs or {},
        )

    def body(self, model: str, prompt: list[int], seed: int) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": seed,
        }
        return body if self.min_p is None else body | {"min_p": self.min_p}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    accuracy: float
    samples: int
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Samples and scores; made once, run at several times."""

    gateway: str
    dataset: Any
    tokenizer: Any
    reward: rewards.Reward
    samples: int
    sampling: Sampling
    concurrency: int = CONCURRENCY
    is_low: bool = False
    """Training goes on beside it, whose rollouts go first."""

    def run(self, model: str) -> Result:
        """The mean reward of `samples` answers that `model` gives, spread over the prompts."""
        rows = [self.dataset[index] for index in range(min(self.samples, len(self.dataset)))]
        asked = [rows[index % len(rows)] for index in range(self.samples)]
        prompts = [self._tokens(row["prompt"]) for row in rows]
        with ThreadPoolExecutor(self.concurrency) as pool:
            bodies = (
                self.sampling.body(model, prompts[index % len(rows)], index)
                for index in range(self.samples)
            )
            answers = list(pool.map(self._complete, bodies))
        scores = self._score(asked, [prompts[i % len(rows)] for i in range(len(asked))], answers)
        scored = [value for value in scores if not math.isnan(value)]
        if not scored:
            raise EvaluationError("the reward function scored none of the sampled answers")
        return Result(accuracy=sum(scored) / len(scored), samples=len(scored), prompts=len(rows))

    def _tokens(self, messages: list[Any]) -> list[int]:
        tokens: list[int] = self.tokenizer.apply_chat_template(
            messages,
            return_dict=False,
            add_generation_prompt=True,
            **self.sampling.chat_template_kwargs,
        )
        return tokens

    def _complete(self, body: Mapping[str, Any]) -> list[int]:
        data = json.dumps(body).encode()
        headers = _LOW_PRIORITY if self.is_low else {}
        answer = post_json(f"{self.gateway}/v1/completions", data, self.sampling.timeout_s, headers)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def _score(
        self, rows: list[dict[str, Any]], prompts: list[list[int]], answers: list[list[int]]
    ) -> list[float]:
        messages = [
            [trl_names.parse_response(self.tokenizer, ids, prompt)]
            for ids, prompt in zip(answers, prompts, strict=True)
        ]
        names = [name for name in rows[0] if name not in _COLUMNS_OF_TRL]
        return rewards.score(
            self.reward,
            prompts=[row["prompt"] for row in rows],
            completions=messages,
            completion_ids=answers,
            columns={name: [row[name] for row in rows] for name in names},
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model, as the server names it, and its context in tokens."""

    name: str
    max_tokens: int


def served_model(gateway: str, timeout_s: float = 30.0) -> ServedModel:
    """The first of the server's models."""
    with _LOCAL.open(f"{gateway}/v1/models", timeout=timeout_s) as response:
        model = json.load(response)["data"][0]
    return ServedModel(model["id"], int(model["max_model_len"]))


def wait_until_healthy(gateway: str, timeout_s: float) -> None:
    """Wait until the gateway says that it has somebody to answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with _LOCAL.open(f"{gateway}/health", timeout=10.0):
                return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > deadline:
                raise EvaluationError(f"{gateway} was not ready in {timeout_s:g} s") from error
        time.sleep(_PAUSE_S)


def post_json(
    url: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """POST, tried again when the server is busy, restarting or cannot be reached."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data=data, headers=headers)
    for attempt in range(_TRIES):
        try:
            with _LOCAL.open(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                text = error.read(500).decode(errors="replace")
                raise EvaluationError(f"{url} answered {error.code}: {text}") from error
            last: Exception = error
        except OSError as error:
            last = error
        time.sleep(_PAUSE_S * 2**attempt)
    raise EvaluationError(f"{url} failed {_TRIES} times: {last}")
