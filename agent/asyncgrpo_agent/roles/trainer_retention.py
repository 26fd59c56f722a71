"""The trainer's upkeep of the bucket: removes adapter versions that nothing can ask for again.

Which ones is decided in `core.retention`; replicas are neither asked nor waited for. Only the
trainer removes, and only between publications. A bucket that forbids it is left alone for an hour,
with one warning that says what to do; any other trouble is left to the next round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Bucket
from asyncgrpo_agent.core.retention import Prune, plan_prune
from asyncgrpo_agent.errors import DeletionForbiddenError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_adapters import Adapters, Record
from asyncgrpo_agent.roles.trainer_turns import Turns

log = Log(__name__)

ROUND_S: Final = 60.0
FORBIDDEN_S: Final = 3600.0
LAST_ROUND_S: Final = 20.0


@dataclass(slots=True)
class Retention:
    """One per trainer. `clock` is the one that the adapters' times are from."""

    config: Bucket
    adapters: Adapters
    bucket: BucketHost
    turns: Turns
    record: Record
    clock: Callable[[], float] = trio.current_time
    _started: float = field(init=False)
    _forbidden_until: float = float("-inf")
    _rounds: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self._started = self.clock()

    async def run(self) -> None:
        """Rounds for ever."""
        while self.config.may_prune:
            await trio.sleep(ROUND_S)
            await self.round()

    async def last_round(self) -> None:
        """After the end of TRL, which will name nothing any more; bounded in time."""
        if self.config.may_prune:
            with trio.move_on_after(LAST_ROUND_S):
                await self.round(is_last=True)

    async def round(self, *, is_last: bool = False) -> None:
        """List, plan, remove; one round at a time, since the last one may come during another."""
        async with self._rounds:
            if not self.adapters.link.attempt or self.clock() < self._forbidden_until:
                return
            try:
                await self._perform(await self._plan(is_last=is_last))
            except StoreError as error:
                log.warning("adapters.unpruned", reason=str(error))

    async def _plan(self, *, is_last: bool) -> list[Prune]:
        await self.turns.upkeep()
        versions = await self.bucket.list_versions()
        await self.turns.upkeep()
        torn = await self.bucket.list_torn()
        return plan_prune(
            attempt=self.adapters.link.attempt,
            versions=versions,
            torn=torn,
            live=self.adapters.live,
            named_at={} if is_last else self.adapters.named_at(),
            keep_every=self.config.keep_every,
            now=self.clock(),
            started=self._started,
        )

    async def _perform(self, plan: list[Prune]) -> None:
        """One version that cannot be removed does not keep the others."""
        began, removed = self.clock(), Counter[str]()
        forbidden: DeletionForbiddenError | None = None
        try:
            for prune in plan:
                await self.turns.upkeep()
                try:
                    objects = await self.bucket.prune(prune.attempt, prune.version)
                except DeletionForbiddenError as error:
                    forbidden = error
                    continue
                removed.update(versions=1, objects=objects)
                log.debug("adapter.pruned", version=prune.version, reason=prune.reason)
        finally:
            if removed:
                fields = {**removed, "planned": len(plan), "seconds": self.clock() - began}
                log.info("adapters.pruned", **fields)
                self.record("pruned", **fields)
        if forbidden is not None and not removed:
            self._forbidden_until = self.clock() + FORBIDDEN_S
            log.warning("adapters.unprunable", reason=str(forbidden), again_in_s=FORBIDDEN_S)
