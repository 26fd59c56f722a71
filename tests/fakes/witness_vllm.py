"""Writes down what the real vLLM answers, from within: `--middleware witness_vllm.record`.

Runs in the engine's Python, so it imports nothing of ours. The lines are those of `fakes.witness`,
into the file that $WITNESS_RECORD names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

FILES = ("adapter_config.json", "adapter_model.safetensors")


async def record(request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
    """An HTTP middleware of Starlette's."""
    is_load = request.url.path == "/v1/load_lora_adapter"
    body = json.loads(await request.body()) if is_load else {}
    response = await answer(request)
    if is_load and response.status_code == 200:
        folder = Path(body["lora_path"])
        sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
        _note(kind="load", name=body["lora_name"], sums=sums)
    if response.status_code >= 400:
        _note(kind="error", path=request.url.path, status=response.status_code)
    return response


def _note(**fields: object) -> None:
    with Path(os.environ["WITNESS_RECORD"]).open("a") as file:
        file.write(json.dumps(fields) + "\n")
