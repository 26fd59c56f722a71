"""Calls a server as TRL does: its own VLLMClient, and aiohttp as its rollout worker uses it.

Run by the engine's Python: `python trl_calls.py URL FOLDER`. Prints one JSON object.
"""

# The agent's Python, in which the checks run, has none of these packages.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from typing import Any

import aiohttp
from accelerate import PartialState
from trl.experimental.async_grpo.vllm_client import VLLMClient

IN_FLIGHT = 256
ROLLOUTS = 600


def sync(client: VLLMClient, name: str, folder: str) -> None:
    client.pause()
    client.load_lora_adapter(name, folder)
    client.resume()


def failed_sync(client: VLLMClient, name: str) -> str:
    try:
        client.load_lora_adapter(name, "/nowhere")
    except Exception as error:  # TRL raises bare exceptions
        return str(error)
    return ""


async def roll_out(url: str, model: str) -> list[int]:
    async def one(session: aiohttp.ClientSession, number: int) -> int:
        payload = {
            "model": model,
            "prompt": list(range(number % 100)),
            "max_tokens": 64,
            "temperature": 1.0,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": number,
        }
        timeout = aiohttp.ClientTimeout(total=60)
        async with session.post(f"{url}/v1/completions", json=payload, timeout=timeout) as answer:
            answer.raise_for_status()
            choice = (await answer.json())["choices"][0]
            return len(choice["token_ids"]) + len(choice["logprobs"]["token_logprobs"])

    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await asyncio.gather(*(one(session, number) for number in range(ROLLOUTS)))


def main(url: str, folder: str) -> dict[str, Any]:
    PartialState(cpu=True)  # TRL's logger insists on one
    client = VLLMClient(url, server_timeout=10)
    client.wait_for_server_ready()
    info = client.get_server_info()
    result = {
        "max_model_len": client.get_max_model_len(),
        "dtype": client.get_dtype(),
        "lora": info["lora_config"],
        "data_parallel_size": info["parallel_config"]["data_parallel_size"],
        "world_size": client.get_world_size(),
        "load_timeout_s": inspect.signature(client.load_lora_adapter).parameters["timeout"].default,
    }
    sync(client, "trl-policy-v1", folder)
    sizes = asyncio.run(roll_out(url, "trl-policy-v1"))
    client.unload_lora_adapter("trl-policy-v1")
    return {**result, "sizes": sizes, "failed_sync": failed_sync(client, "fails")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])))
