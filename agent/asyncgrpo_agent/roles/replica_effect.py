"""Whether adapters change anything: a fixed prompt, scored with the base model and through them.

An adapter whose modules vLLM does not serve loads without a word and changes nothing. Looked at
now and then in the background, never between a load and its ack; the first versions of a run are
left out, since they change next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.errors import EngineError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.engine_client import EngineClient

log = Log(__name__)

EVERY_S: Final = 30.0
VERSIONS: Final = 4  # between two looks, and before the first
PROMPT: Final = list(range(16))  # tokens that every vocabulary has


@dataclass(slots=True)
class EffectWatch:
    """Of one replica. `effect` is -1 until an adapter was looked at, then the greatest change of a
    log-probability that `version` made."""

    client: EngineClient
    base_model: str
    loaded: Callable[[], Sequence[str]]
    effect: float = -1.0
    version: int = -1
    _base: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """For ever."""
        while True:
            await trio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """At the newest adapter, if it is new enough."""
        name, version = newest(self.loaded())
        if version < self.version:  # another attempt
            self.effect, self.version = -1.0, -1
        if version < self.version + VERSIONS:
            return
        try:
            if not self._base:
                self._base = await self.client.score(self.base_model, PROMPT)
            scores = await self.client.score(name, PROMPT)
        except EngineError as error:  # it may have been unloaded meanwhile
            log.debug("adapter.unscored", adapter=name, reason=str(error))
            return
        changes = (abs(one - other) for one, other in zip(scores, self._base, strict=True))
        self.effect, self.version = max(changes), version
        if not self.effect:
            log.warning("adapter.without_effect", adapter=name)


def newest(names: Sequence[str]) -> tuple[str, int]:
    """The adapter of the highest version, and that; ("", -1) if there is none."""
    versions = [(parts.version, name) for name in names if (parts := parse_name(name)) is not None]
    version, name = max(versions, default=(-1, ""))
    return name, version
