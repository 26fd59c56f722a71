"""The two ways of `scripts/bench quorum` to serve TRL: through the agents, and without them.

Both make TRL's calls in TRL's order: pause, save the adapter, load it under a new name, resume,
unload the version that no sample may come from any more, and only then name the new one.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import trio
from quorum_fleet import Fleet
from sync import REFERENCE_SEED, copy_adapter, load_patiently, to_all
from sync_trl import STALENESS, Server, write_adapter

FIRST = 1  # TRL's own first version


class Way(Protocol):
    """How rollouts and adapters get to the engines."""

    async def sync(self, version: int) -> None: ...
    async def complete(self, version: int, body: dict[str, Any]) -> bool: ...


@dataclass
class Ours:
    """TRL's own calls, to the gateway."""

    gateway: Server
    folder: Path
    size_mb: int

    async def sync(self, version: int) -> None:
        await self.gateway.must("POST", "/pause?mode=keep")
        folder = await _save(self.folder, version, self.size_mb)
        body = {"lora_name": _name(version), "lora_path": str(folder), "load_inplace": False}
        await self.gateway.must("POST", "/v1/load_lora_adapter", body)
        await self.gateway.must("POST", "/resume")
        if (stale := version - STALENESS - 1) >= FIRST:
            await self.gateway.must("POST", "/v1/unload_lora_adapter", {"lora_name": _name(stale)})

    async def complete(self, version: int, body: dict[str, Any]) -> bool:
        return await _complete(self.gateway, {**body, "model": _name(version)})


@dataclass
class Reference:
    """All engines paused while the adapter comes to them over the mount.

    A rollout goes to the engine with the fewest in flight, which costs no proxy anything.
    """

    fleet: Fleet
    engines: dict[str, Server]
    size_mb: int
    round: str  # its names are no other round's
    _held: list[int] = field(default_factory=list)
    _in_flight: Counter[str] = field(default_factory=Counter)

    async def sync(self, version: int) -> None:
        key = f"reference-{self.round}/{_name(version)}"
        await to_all(self.engines, "/pause?mode=keep")
        saved = self.fleet.site.folder / f"trl-reference-{self.round}"
        local = await _save(saved, REFERENCE_SEED + version, self.size_mb)
        mounts = self.fleet.mounts
        await trio.to_thread.run_sync(copy_adapter, local, mounts.trainer / key)
        async with trio.open_nursery() as nursery:
            for name, engine in self.engines.items():
                folder = str(mounts.replicas[name] / key)
                nursery.start_soon(load_patiently, engine, self._served(version), folder)
        await to_all(self.engines, "/resume")
        self._held.append(version)
        if (stale := version - STALENESS - 1) >= FIRST:
            await self._unload(stale)

    async def forget(self) -> None:
        """Leave the engines as they were."""
        for version in list(self._held):
            await self._unload(version)

    async def _unload(self, version: int) -> None:
        self._held.remove(version)
        body = {"lora_name": self._served(version)}
        await to_all(self.engines, "/v1/unload_lora_adapter", body)

    async def complete(self, version: int, body: dict[str, Any]) -> bool:
        name = min(self.engines, key=lambda each: self._in_flight[each])
        self._in_flight[name] += 1
        try:
            return await _complete(self.engines[name], {**body, "model": self._served(version)})
        finally:
            self._in_flight[name] -= 1

    def _served(self, version: int) -> str:
        return f"reference-{self.round}-{_name(version)}"


async def _save(folder: Path, version: int, size_mb: int) -> Path:
    """The adapter on local disk, and none but it."""

    def save() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return write_adapter(folder / f"v{version}", version, size_mb)

    return await trio.to_thread.run_sync(save)


async def _complete(server: Server, body: dict[str, Any]) -> bool:
    """Whether the answer is what TRL can use."""
    status, content = await server.call("POST", "/v1/completions", body)
    if status != 200:
        return False
    return len(json.loads(content)["choices"][0]["token_ids"]) == body["max_tokens"]


def _name(version: int) -> str:
    return f"trl-policy-v{version}"
