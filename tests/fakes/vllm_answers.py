"""The shapes of vLLM's answers, as FakeVllm gives them."""

from __future__ import annotations

from typing import Any

from asyncgrpo_agent.net.http1 import Response, json_response


def words(ids: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)


def logprobs_of(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    texts = [words([token]) for token in ids]
    return {
        "text_offset": list(range(len(ids))),
        "token_logprobs": logprobs,
        "tokens": texts,
        "top_logprobs": [{word: value} for word, value in zip(texts, logprobs, strict=True)],
    }


def model_card(name: str, *, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [],
    }


def failure(status: int, message: str, kind: str) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json_response(status, {"error": error})


def text_response(text: str) -> Response:
    return Response(status=200, content_type="text/plain", body=text.encode())
