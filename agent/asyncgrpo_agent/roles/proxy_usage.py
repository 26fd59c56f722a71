"""Keeps count of what runs cost, over restarts of the proxy, and says so now and then.

A proxy that is killed forgets a minute at most.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.core.usage import Usage
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.store import usages

SAVE_EVERY_S: Final = 60.0
SAY_EVERY_S: Final = 3600.0

log = Log(__name__)


class UsageBook:
    """All runs that this proxy ever counted for."""

    def __init__(self, state_dir: Path) -> None:
        self._path = usages.path_of(state_dir)
        self._known, fault = usages.read(self._path)
        self._said: dict[str, float] = {}  # replica-seconds, by run
        self._is_failing = False
        if fault:
            log.error("usage.lost", file=str(self._path), reason=fault)

    def of(self, run: str) -> Usage:
        """To be charged by its run; it goes on where an earlier proxy stopped."""
        return self._known.setdefault(run, Usage())

    async def keep(self, runs: Mapping[str, ProxyRun]) -> None:
        """For ever."""
        said_at = trio.current_time()
        while True:
            await trio.sleep(SAVE_EVERY_S)
            await self.save(runs)
            if trio.current_time() - said_at >= SAY_EVERY_S:
                said_at = trio.current_time()
                self._say()

    async def save(self, runs: Mapping[str, ProxyRun]) -> None:
        """Charge what is there up to now, and write if that changed anything."""
        before = copy.deepcopy(self._known)
        for run in runs.values():
            run.charge(trio.current_time())
        if self._known == before and not self._is_failing:
            return
        content = usages.encode(self._known)
        try:
            await trio.to_thread.run_sync(usages.write, self._path, content)
        except OSError as error:
            if not self._is_failing:
                log.error("usage.unsaved", file=str(self._path), reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    def _say(self) -> None:
        for run, usage in self._known.items():
            if usage.replica_s != self._said.get(run, 0.0):
                self._said[run] = usage.replica_s
                log.info(
                    "run.usage",
                    run=run,
                    replica_hours=round(usage.replica_hours, 3),
                    unpriced_hours=round(usage.unpriced_hours, 3),
                    cost=round(usage.cost, 4),
                )
