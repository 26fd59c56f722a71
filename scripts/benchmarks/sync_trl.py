"""TRL's part in `scripts/bench sync`: adapters on local disk, and calls to the gateway's own HTTP.

Rollouts are always in flight, under the newest name whose load call has returned, as TRL makes
them; so engines generate, and whatever keeps rollouts from them shows in their token counters.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpcore
import trio

from fakes.adapters import CONFIG, WEIGHTS

RANK = 8
LAYER_BYTES = 1_000_000
HIDDEN = LAYER_BYTES // (2 * RANK * 4)  # an A and a B of 4-byte numbers
STALENESS = 4
MAX_LORAS = 8
PROMPT_TOKENS = 40
MIN_TOKENS, MAX_TOKENS = 50, 150  # of a rollout


def write_adapter(folder: Path, version: int, size_mb: int) -> Path:
    """A LoRA of one megabyte a layer, a layer in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for layer in range(size_mb):
        for part, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
            ends = [offset, offset := offset + LAYER_BYTES // 2]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": ends}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = Random(version)
    folder.mkdir(parents=True)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(size_mb):
            file.write(random.randbytes(LAYER_BYTES))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"]}
    config |= {"bias": "none", "use_dora": False, "modules_to_save": None}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


class Server:
    """Calls to one HTTP server. `socket` is the path of a Unix socket."""

    def __init__(self, url: str, socket: str | None = None) -> None:
        self._url = url
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=4096, max_keepalive_connections=4, keepalive_expiry=3.0, uds=socket
        )

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        return await self.send(method, path, b"" if body is None else json.dumps(body).encode())

    async def send(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        """The same with JSON that is encoded already."""
        headers = {"Host": "127.0.0.1", "Content-Type": "application/json"}
        answer = await self._pool.request(
            method, self._url + path, headers=headers, content=content
        )
        return answer.status, answer.content

    async def must(self, method: str, path: str, body: Any = None) -> bytes:
        status, content = await self.call(method, path, body)
        if status != 200:
            raise SystemExit(f"{method} {path}: {status} {content[:500].decode(errors='replace')}")
        return content


@dataclass
class Trl:
    """One training run without any training."""

    gateway: Server
    folder: Path
    size_mb: int
    version: int = -1
    failed_rollouts: int = 0
    rollouts: int = 0
    _random: Random = field(default_factory=lambda: Random(1))
    _saved: Path | None = None

    async def save(self) -> None:
        """The next adapter, onto local disk."""
        if self._saved is not None:
            await trio.to_thread.run_sync(shutil.rmtree, self._saved)
        folder = self.folder / f"v{self.version + 1}"
        self._saved = await trio.to_thread.run_sync(
            write_adapter, folder, self.version + 1, self.size_mb
        )

    async def load(self) -> None:
        """TRL's sync of what was saved, until the gateway lets TRL go on."""
        name = _name(self.version + 1)
        await self.gateway.must("POST", "/pause?mode=keep")
        body = {"lora_name": name, "lora_path": str(self._saved), "load_inplace": False}
        await self.gateway.must("POST", "/v1/load_lora_adapter", body)
        await self.gateway.must("POST", "/resume")
        self.version += 1

    async def unload_oldest(self) -> None:
        if self.version > STALENESS:
            body = {"lora_name": _name(self.version - STALENESS - 1)}
            await self.gateway.must("POST", "/v1/unload_lora_adapter", body)

    async def roll_out(self) -> None:
        """For ever: one rollout after the other."""
        while True:
            body = {
                "model": _name(self.version),
                "prompt": [self._random.randrange(300) for _ in range(PROMPT_TOKENS)],
                "max_tokens": self._random.randint(MIN_TOKENS, MAX_TOKENS),
                "return_token_ids": True,
                "logprobs": 0,
                "seed": self._random.randrange(1 << 30),
            }
            status, _ = await self.gateway.call("POST", "/v1/completions", body)
            self.rollouts += 1
            self.failed_rollouts += status != 200


def _name(version: int) -> str:
    return f"trl-policy-v{version}"
