"""vLLM's own counters, which tell a long rollout from a hung engine: read, kept, and told."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.engine_client import Counters
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_effect import EffectWatch
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

PROGRESS_EVERY_S: Final = 2.0


@dataclass
class EngineWatch:
    """Of one vLLM. `counters` is None until they were read, and again while it is down."""

    engine: EngineHost
    loader: Loader
    effect: EffectWatch
    tell: Callable[[m.FromDialler], Awaitable[None]]
    counters: Counters | None = None
    paused_s: float = 0.0  # so far

    async def run(self) -> None:
        """For ever."""
        last = trio.current_time()
        while True:
            await trio.sleep(PROGRESS_EVERY_S)
            if self.engine.facts is None:
                self.counters = None
                last = trio.current_time()
                continue
            try:
                self.counters = counters = await self.engine.client.counters()
                is_paused = await self.engine.client.is_paused()
            except EngineError as error:
                log.warning("engine.silent", reason=str(error))
                continue
            now = trio.current_time()
            self.paused_s, last = self.paused_s + (now - last if is_paused else 0.0), now
            await self.tell(
                m.Progress(
                    running=counters.running,
                    waiting=counters.waiting,
                    generated_tokens=counters.generated_tokens,
                    kv_used=counters.kv_used,
                    paused_s=self.paused_s,
                    awaited=self.loader.standing(),
                    unix_s=time.time(),  # noqa: TID251 - a role reads the clock
                    effect=self.effect.effect,
                    effect_version=self.effect.version,
                )
            )
