"""Replicas that an operator wants gone: the proxy's side of `asyncgrpo-agent drain`.

The replica is DRAINING from the moment on in which the order is read, so that nothing new is placed
there, and its agent is told to finish; it does so as when a run ends. One whose link breaks
meanwhile is told again when it is back. An upstream has no agent: it stays, and gets nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_links import ReplicaLink, tell
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.store import drain_orders
from asyncgrpo_agent.store.drain_orders import DrainAnswer, DrainOrder
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

LOOK_EVERY_S: Final = 0.5
REASON: Final = "drained by command"
_NAMES: Final = 20  # that an error lists


@dataclass(slots=True)
class DrainDesk:
    """Reads the orders of one proxy. `unix_time_s` is the wall clock, which orders end by."""

    state_dir: Path
    runs: Mapping[str, ProxyRun]
    unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - a role reads the clock

    async def serve(self) -> None:
        """For ever; a folder that cannot be used costs this command and nothing else."""
        try:
            drain_orders.open_folder(self.state_dir)
        except OSError as error:
            log.error("drain.unavailable", reason=str(error))
            return
        async with trio.open_nursery() as nursery:
            while True:
                for order_id, order in self._orders():
                    nursery.start_soon(self._obey, order_id, order)
                await trio.sleep(LOOK_EVERY_S)

    def _orders(self) -> list[tuple[str, DrainOrder | DrainAnswer]]:
        try:
            return list(drain_orders.take_all(self.state_dir, self.unix_time_s()))
        except OSError as error:
            log.error("drain.unreadable", reason=str(error))
            return []

    async def _obey(self, order_id: str, order: DrainOrder | DrainAnswer) -> None:
        found = self._find(order) if isinstance(order, DrainOrder) else order
        try:
            if isinstance(found, DrainAnswer):
                log.warning("drain.refused", reason=found.fault)
                drain_orders.answer(self.state_dir, order_id, found)
                return
            run_, here = found
            await drain_replica(run_, here, REASON)
            await self._report(order_id, run_, here)
        except OSError as error:  # its command says that nothing came
            log.error("drain.unanswered", reason=str(error))

    async def _report(self, order_id: str, run_: ProxyRun, here: ReplicaLink) -> None:
        """Answer until the replica has gone or nobody wants to know."""
        answer = _answer(run_, here)
        drain_orders.answer(self.state_dir, order_id, answer)
        while not answer.done and drain_orders.is_awaited(self.state_dir, order_id):
            await trio.sleep(LOOK_EVERY_S)
            answer = _answer(run_, here)
            if drain_orders.is_awaited(self.state_dir, order_id):
                drain_orders.answer(self.state_dir, order_id, answer)

    def _find(self, order: DrainOrder) -> tuple[ProxyRun, ReplicaLink] | DrainAnswer:
        runs = [run_ for run_ in self.runs.values() if order.run in ("", run_.name)]
        found = [(run_, run_.links[order.replica]) for run_ in runs if order.replica in run_.links]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(run_.name for run_, _ in found)
            fault = f"there is a replica {order.replica!r} in each of the runs {names}"
            return DrainAnswer(fault=fault, fix="Say which: --run RUN")
        fault = f"there is no replica {order.replica!r}"
        fault += f" in run {order.run!r}" if order.run else ""
        return DrainAnswer(fault=fault, fix=_known(runs or self.runs.values()))


def _known(runs: Iterable[ProxyRun]) -> str:
    names = [f"{name} of run {run_.name}" for run_ in runs for name in run_.links]
    if not names:
        return "None is registered now"
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"Registered now: {', '.join(names[:_NAMES])}{more}"


async def drain_replica(run_: ProxyRun, here: ReplicaLink, reason: str) -> None:
    """Place nothing there any more, and have its agent end when it has finished what it runs."""
    run_.dismissed[here.replica.instance] = reason
    run_.note(replicas.drain(here.replica, reason, trio.current_time()))
    await tell([here], m.Finish(reason))


def _answer(run_: ProxyRun, here: ReplicaLink) -> DrainAnswer:
    """As it is now. Without its link it has gone: all that it ran has ended with that."""
    in_flight = here.replica.in_flight
    stays = here.source == "upstream"
    done = run_.links.get(here.replica.name) is not here or (stays and not in_flight)
    return DrainAnswer(run=run_.name, in_flight=in_flight, done=done, stays=stays)
