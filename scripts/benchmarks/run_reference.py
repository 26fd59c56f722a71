"""The reference of `scripts/bench run`: one address before all engines, as published recipes do.

TRL's `pause` and `resume` reach every engine, `load_lora_adapter` copies the adapter onto the mount
and posts its path to each, again every 0.5 s while it says 'No adapter found'. A rollout goes to
the engine with the fewest in flight.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import trio
from run_trl import Step, step_of
from sync import copy_adapter, load_patiently, to_all
from sync_mounts import Mounts
from sync_trl import Server

from asyncgrpo_agent.net import http1
from asyncgrpo_agent.net.http1 import JSON, Request, Response, json_response

FOLDER = "reference"
LIMITS = http1.Limits(idle_s=600.0)


class Reference:
    """Serves TRL. `steps` are those that it has told."""

    def __init__(self, engines: dict[str, Server], mounts: Mounts) -> None:
        self.steps: list[Step] = []
        self._engines = engines
        self._mounts = mounts
        self._in_flight: Counter[str] = Counter()

    async def run(self, *, task_status: trio.TaskStatus[str]) -> None:
        """Until cancelled. What has started is the URL."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        task_status.started(f"http://127.0.0.1:{port}")
        await http1.serve(listeners, self._handle, hop="reference", limits=LIMITS)

    async def _handle(self, request: Request) -> Response:
        match request.path:
            case "/v1/completions":
                return await self._complete(request)
            case "/pause" | "/resume":
                await to_all(self._engines, f"{request.path}?mode=keep")
                return json_response(200, {})
            case "/v1/load_lora_adapter":
                await self._load(json.loads(request.body))
                return json_response(200, {})
            case "/v1/unload_lora_adapter":
                await to_all(self._engines, request.path, json.loads(request.body))
                return json_response(200, {})
            case "/.agrpo/event":
                self._note(json.loads(request.body))
                return json_response(200, {})
        return await self._ask_one(request)

    async def _complete(self, request: Request) -> Response:
        name = min(self._engines, key=lambda each: self._in_flight[each])
        self._in_flight[name] += 1
        try:
            return _answer(await self._engines[name].send("POST", request.path, request.body))
        finally:
            self._in_flight[name] -= 1

    async def _load(self, body: dict[str, Any]) -> None:
        name, local = body["lora_name"], Path(body["lora_path"])
        key = f"{FOLDER}/{name}"
        await trio.to_thread.run_sync(copy_adapter, local, self._mounts.trainer / key)
        async with trio.open_nursery() as nursery:
            for engine_name, engine in self._engines.items():
                folder = str(self._mounts.replicas[engine_name] / key)
                nursery.start_soon(load_patiently, engine, name, folder)

    async def _ask_one(self, request: Request) -> Response:
        """What all engines answer alike."""
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        engine = next(iter(self._engines.values()))
        return _answer(await engine.send(request.method, f"{request.path}?{query}", request.body))

    def _note(self, event: dict[str, Any]) -> None:
        if event["kind"] == "metrics":
            self.steps.append(step_of(event, time.time()))


def _answer(answer: tuple[int, bytes]) -> Response:
    status, content = answer
    return Response(status=status, content_type=JSON, body=content)
