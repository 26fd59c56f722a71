"""The fleet as the proxy tells the trainer of it: who is there, what its engines can, the totals.

What changes goes to the run's history. Nothing here decides about replicas; that is the proxy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.errors import ChildNotReadyError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

TELL_WAITING_S: Final = 10.0


@dataclass(slots=True)
class FleetView:
    """What was told last; `now` is None until something was."""

    config: Config
    run: str
    record: Callable[..., None]
    now: m.Fleet | None = None
    _engine: m.EngineFacts | None = None  # what the fleet's engines last had in common
    _changed: trio.Event = field(default_factory=trio.Event)

    @property
    def ready(self) -> int:
        """Replicas whose engine is up."""
        return self.now.ready if self.now is not None else 0

    @property
    def _rows(self) -> list[m.ReplicaRow]:
        return self.now.replicas if self.now is not None else []

    def take(self, fleet: m.Fleet) -> None:
        """The proxy tells the whole fleet anew."""
        before = {row.name: row for row in self._rows}
        for row in fleet.replicas:
            known = before.pop(row.name, None)
            if known is None or known.state != row.state:
                kind = {"unverified": True} if row.unverified else {}
                self.record("replica", name=row.name, state=row.state, reason=row.reason, **kind)
            if known is None or known.loaded != row.loaded:
                self.record("holds", replica=row.name, loaded=row.loaded)
        for name in before:
            self.record("replica", name=name, state="GONE", reason="its link ended")
        self.now, self._engine = fleet, fleet.engine or self._engine
        self._changed.set()
        self._changed = trio.Event()

    def max_rank(self) -> int:
        """The fleet knows; this host's own configuration need not say anything about replicas."""
        return (self._engine or self.config.engine).max_lora_rank

    async def wait_for_replicas(self) -> None:
        """Until `min_replicas` are ready. Raises ChildNotReadyError after `wait_replicas_s`."""
        wanted, limit_s = self.config.trainer.min_replicas, self.config.trainer.wait_replicas_s
        deadline = trio.current_time() + (limit_s or float("inf"))
        while (ready := self.ready) < wanted:
            states = {row.name: f"{row.state}: {row.reason}" for row in self._rows}
            if trio.current_time() >= deadline:
                raise ChildNotReadyError(
                    f"{ready} of {wanted} replicas are ready after {limit_s:g} s",
                    where=f"run {self.run}",
                    fix=f"Replicas: {states or 'none has joined'}; see their logs",
                )
            log.info("replicas.awaited", ready=ready, wanted=wanted, states=states)
            await self._change(min(deadline, trio.current_time() + TELL_WAITING_S), ready)
        log.info("replicas.ready", ready=ready)

    async def _change(self, deadline: float, ready: int) -> None:
        """Until another number of replicas is ready, or the deadline."""
        with trio.move_on_at(deadline):
            while self.now is None or self.now.ready == ready:
                await self._changed.wait()

    def totals(self) -> dict[str, Any]:
        """For the history, of all that the proxy counts."""
        fleet = self.now
        return {
            "retried": fleet.retried if fleet else 0,
            "duplicates": fleet.duplicates if fleet else 0,
            "delayed": fleet.delayed if fleet else 0,
            "replica_hours": fleet.replica_hours if fleet else 0.0,
            "unpriced_hours": fleet.unpriced_hours if fleet else 0.0,
            "cost": fleet.cost if fleet else 0.0,
            "routed": fleet.routed if fleet else {},
            "held_s": fleet.held_s if fleet else 0.0,
            "replicas": [
                {
                    "name": row.name,
                    "requests": row.requests,
                    "failures": row.failures,
                    "paused_s": row.paused_s,
                }
                for row in self._rows
            ],
        }
