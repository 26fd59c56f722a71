"""The names of the proxy's replicas: who gets which, and what of it survives a restart.

`core.names` decides, this module keeps what it decides by. Names are given from memory; the file
follows within moments and in one write for any number of joins, so that a fleet that comes back
does not wait for a disk. A state folder that cannot be written costs nothing until a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.core.names import Duplicate, Holder, Seat, admit_name
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_run import ProxyRun, Runs
from asyncgrpo_agent.store.host_bindings import HostBindings
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

LOOK_EVERY_S: Final = 3600.0  # at who is live, whose binding must not age
RETRY_S: Final = 30.0


@dataclass(slots=True)
class ReplicaNames:
    """Of all `runs` of one proxy. `unix_time_s` is the wall clock, which bindings age by."""

    runs: Runs
    bindings: HostBindings
    unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - a role reads the clock
    _changed: trio.Event = field(default_factory=trio.Event)
    _is_failing: bool = False

    def admit(self, run_: ProxyRun, hello: m.Hello) -> Seat | Duplicate:
        """The name for a replica whose hello was admitted; bound from now on if it is to be."""
        live = {
            name: Holder(key=here.host_key, instance=here.replica.instance, replaced=here.replaced)
            for name, here in run_.links.items()
        }
        bound = self.bindings.keys(run_.name)
        found = admit_name(hello.name, hello.host_key, hello.instance, bound, live)
        if isinstance(found, Seat):
            self._remember(run_, found, hello.host_key)
        return found

    def _remember(self, run_: ProxyRun, seat: Seat, key: str) -> None:
        now = self.unix_time_s()
        if not seat.bind:
            self.bindings.seen(run_.name, [seat.name], now)
        elif not self.bindings.bind(run_.name, seat.name, key, run_.links, now):
            reason = "the run has too many names; this one is the host's only while it is here"
            log.warning("replica.unbound", run=run_.name, replica=seat.name, reason=reason)
        if self.bindings.unsaved:
            self._changed.set()

    async def keep(self) -> None:
        """Write what changes, for ever."""
        while True:
            with trio.move_on_after(LOOK_EVERY_S):
                await self._changed.wait()
            self._changed = trio.Event()
            for run_ in self.runs.values():
                self.bindings.seen(run_.name, run_.links, self.unix_time_s())
            while self.bindings.unsaved:
                if not await self._save():
                    await trio.sleep(RETRY_S)

    async def _save(self) -> bool:
        content = self.bindings.take_unsaved()
        try:
            await trio.to_thread.run_sync(self.bindings.save, content)
        except OSError as error:
            self.bindings.unsaved = True
            if not self._is_failing:
                log.error("hosts.unsaved", file=str(self.bindings.path), reason=str(error))
            self._is_failing = True
            return False
        if self._is_failing:
            log.info("hosts.saved", file=str(self.bindings.path))
        self._is_failing = False
        return True
