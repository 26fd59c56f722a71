"""What FakeVllm does beyond the contract that the real vLLM is checked against."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from asyncgrpo_agent.net.http1 import Request, Response
from fakes.adapters import adapter_digest, write_adapter
from fakes.vllm import BASE_DIGEST, FakeVllm


async def post(fake: FakeVllm, path: str, body: dict[str, object]) -> Response:
    data = json.dumps(body).encode()
    return await fake.handle(Request(method="POST", path=path, query={}, headers={}, body=data))


async def load(fake: FakeVllm, name: str, folder: Path) -> int:
    body: dict[str, object] = {"lora_name": name, "lora_path": str(folder)}
    return (await post(fake, "/v1/load_lora_adapter", body)).status


async def fingerprint(fake: FakeVllm, model: str) -> tuple[int, str]:
    answer = await post(fake, "/v1/completions", {"model": model, "prompt": [1], "max_tokens": 1})
    return answer.status, json.loads(answer.body).get("system_fingerprint", "")


async def test_answers_are_signed_with_the_bytes_behind_them(tmp_path: Path) -> None:
    fake = FakeVllm()
    for seed in (1, 2):
        folder = write_adapter(tmp_path / f"v{seed}", seed=seed)
        assert await load(fake, f"v{seed}", folder) == 200
        assert await fingerprint(fake, f"v{seed}") == (200, adapter_digest(folder))
    assert await fingerprint(fake, fake.model) == (200, BASE_DIGEST)


async def test_an_evicted_adapter_is_read_again(tmp_path: Path) -> None:
    fake = FakeVllm(max_loras=1)
    folders = [write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    for folder in folders:
        await load(fake, folder.name, folder)
    assert await fingerprint(fake, "a") == (200, adapter_digest(folders[0]))
    shutil.rmtree(folders[1])
    assert (await fingerprint(fake, "b"))[0] == 500  # and the engine does not survive it
    assert (await fingerprint(fake, "a"))[0] == 500
    health = Request(method="GET", path="/health", query={}, headers={}, body=b"")
    assert (await fake.handle(health)).status == 503


async def test_adapters_can_be_lost(tmp_path: Path) -> None:
    fake = FakeVllm()
    await load(fake, "v1", write_adapter(tmp_path / "v1"))
    fake.lose_adapters()
    assert (await fingerprint(fake, "v1"))[0] == 404
