"""One run as the proxy serves it: its replicas, its trainer, its adapters, its syncs.

Everything here happens in the proxy's one thread between checkpoints, so the state needs no lock.
Decisions come from `core`; this module performs them on control channels and logs the reasons. It
must not touch sockets or parse bodies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.replicas import Fleet, Replica, State, Transition
from asyncgrpo_agent.core.routing import PrefixRouter
from asyncgrpo_agent.core.sync import Sync
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import ControlChannel
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

TELL_S: Final = 1.0
ASK_EVERY_S: Final = 5.0

ProxyChannel = ControlChannel[m.FromAcceptor, m.FromDialler]


@dataclass(slots=True, kw_only=True)
class ReplicaLink:
    """A registered replica and the connection that reaches it."""

    replica: Replica
    link: Link
    control: ProxyChannel
    engine: m.EngineFacts | None = None
    _awaited: set[trio.CancelScope] = field(default_factory=set)

    @contextmanager
    def answer_awaited(self) -> Iterator[trio.CancelScope]:
        """A block that is cancelled when the replica's engine is found to hang."""
        with trio.CancelScope() as scope:
            self._awaited.add(scope)
            try:
                yield scope
            finally:
                self._awaited.discard(scope)

    def give_up_on_answers(self) -> None:
        for scope in self._awaited:
            scope.cancel()


@dataclass(slots=True, kw_only=True)
class TrainerSeat:
    """The trainer's agent; there is one, that of the newest attempt."""

    link: Link
    control: ProxyChannel


@dataclass(slots=True, kw_only=True)
class Holding:
    """Rollouts that wait because nobody can take them, and for how long some did so far."""

    waiting: int = 0
    held_s: float = 0.0
    since: float = 0.0

    def enter(self, now: float) -> None:
        if self.waiting == 0:
            self.since = now
        self.waiting += 1

    def leave(self, now: float) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self.held_s += now - self.since

    def total_s(self, now: float) -> float:
        return self.held_s + (now - self.since if self.waiting else 0.0)


@dataclass(slots=True)
class ProxyRun:
    """The proxy's state of one run. `attempt` is empty until a trainer has registered."""

    name: str
    attempt: str = ""
    attempt_seen: int = 0  # the highest that any agent knows of, also of an earlier proxy
    fleet: Fleet = field(default_factory=Fleet)
    links: dict[str, ReplicaLink] = field(default_factory=dict)
    trainer: TrainerSeat | None = None
    router: PrefixRouter = field(default_factory=PrefixRouter)
    known: dict[str, m.Announce] = field(default_factory=dict)  # by physical name
    live: list[str] = field(default_factory=list)
    syncs: dict[str, Sync] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)  # by physical name
    holding: Holding = field(default_factory=Holding)
    routed: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    finished: str = ""  # why the run is over
    _changed: trio.Event = field(default_factory=trio.Event)

    # --- waking those who wait -----------------------------------------------------------

    def wake(self) -> None:
        """Something changed that a held rollout, a sync or the trainer may wait for."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self, deadline: float) -> bool:
        """Wait for the next change; False when the deadline (trio clock) passed first."""
        with trio.move_on_at(deadline) as scope:
            await self._changed.wait()
        return not scope.cancelled_caught

    # --- replicas ------------------------------------------------------------------------

    def free_name(self, wanted: str) -> str:
        """The replica's own name, or a suffixed one while another process holds it."""
        name, number = wanted, 1
        while name in self.links:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def engine(self) -> m.EngineFacts | None:
        """What all engines of the run share, with the fleet's smallest limits."""
        facts = [link.engine for link in self.links.values() if link.engine is not None]
        if not facts:
            return None
        return msgspec.structs.replace(
            facts[0],
            max_model_len=min(f.max_model_len for f in facts),
            max_loras=min(f.max_loras for f in facts),
            max_lora_rank=min(f.max_lora_rank for f in facts),
        )

    def mismatch(self, joining: str, facts: m.EngineFacts) -> str | None:
        """Why these facts cannot join the run, or None."""
        for name, link in self.links.items():
            if name != joining and link.engine is not None:
                return replicas.engine_mismatch(link.engine, facts)
        return None

    def note(self, transition: Transition | None) -> None:
        """Log a change of state and let everybody look again."""
        if transition is None:
            return
        lost = transition.after is State.GONE and transition.before is not State.DRAINING
        level = log.warning if lost or transition.after is State.SUSPECT else log.info
        level(
            "replica.state",
            run=self.name,
            replica=transition.replica,
            before=transition.before.value,
            after=transition.after.value,
            reason=transition.reason,
        )
        link = self.links.get(transition.replica)
        if transition.after is State.SUSPECT and link is not None and link.replica.hangs:
            link.give_up_on_answers()
        self.wake()

    def leave(self, gone: ReplicaLink, reason: str, now: float) -> None:
        """The link of a replica ended."""
        name = gone.replica.name
        if self.links.get(name) is gone:
            del self.links[name]
            self.router.forget(name)
        self.note(self.fleet.leave(name, gone.replica.instance, now, reason))
        for sync in self.syncs.values():
            sync.gone(name)
        self.wake()

    # --- adapters ------------------------------------------------------------------------

    async def publish(self, message: m.Published) -> Sync:
        """An adapter is durable: count the capacity, announce it, and follow the acks."""
        announce = m.Announce(message.adapter, message.commit, message.live)
        self.known[message.adapter.name] = announce
        self._set_live(message.live)
        ready = {r.name: r.capacity for r in self.fleet if r.state is State.READY}
        sync = Sync(
            adapter=message.adapter.name,
            started=trio.current_time(),
            quorum=message.quorum,
            timeout_s=message.timeout_s,
            capacity=ready,
        )
        for name in ready:
            if message.adapter.name in self.fleet.replicas[name].loaded:
                sync.ack(name, sync.started)
        self.syncs[message.adapter.name] = sync
        await self.tell_replicas(announce)
        self.wake()
        return sync

    def _set_live(self, live: list[str]) -> None:
        self.live = list(live)
        # A retired adapter may still be asked for; what left the window long ago may not.
        for name in list(self.known)[: -4 * max(1, len(live))]:
            if name not in self.live:
                del self.known[name]
                self.syncs.pop(name, None)
                self.asked_at.pop(name, None)

    async def retire(self, message: m.Retired) -> None:
        self._set_live(message.live)
        await self.tell_replicas(m.Retire(message.names, message.live))

    async def ask_for(self, name: str) -> None:
        """A rollout names an adapter that no ready replica holds: have it loaded again.

        It may be retired, or its only holders are gone; replicas load the newest by themselves and
        older ones when they are asked. Asked again now and then, for replicas come and go.
        """
        now = trio.current_time()
        if now - self.asked_at.get(name, -math.inf) < ASK_EVERY_S:
            return
        self.asked_at[name] = now
        announce = self.known[name]
        if name not in self.live:
            self.live = [name, *self.live]
        await self.tell_replicas(m.Announce(announce.adapter, announce.commit, self.live))

    def holds(self, name: str, loaded: list[str], now: float) -> None:
        """A replica's whole list: also what it loaded while its link was down counts."""
        self.fleet.replicas[name].loaded = frozenset(loaded)
        for adapter in loaded:
            if adapter in self.syncs:
                self.syncs[adapter].ack(name, now)
        self.wake()

    async def ack(self, name: str, ack: m.Ack, now: float) -> None:
        """A replica loaded an adapter or refused it."""
        sync = self.syncs.get(ack.adapter.name)
        if sync is not None:
            if ack.ok:
                sync.ack(name, now)
            else:
                sync.fail(name, ack.reason)
        fields = {"run": self.name, "replica": name, "adapter": ack.adapter.name}
        if ack.ok:
            log.info("adapter.acked", **fields, **{f"{k}_s": v for k, v in ack.phases_s.items()})
        else:
            log.warning("adapter.refused", **fields, reason=ack.reason)
        self.wake()
        since_s = now - sync.started if sync is not None else 0.0
        await self.tell_trainer(m.ReplicaAck(name, ack, since_s))

    def report(self, sync: Sync, adapter: m.Adapter, now: float) -> m.SyncReport:
        verdict = sync.verdict(now)
        return m.SyncReport(
            adapter=adapter,
            acked=sorted(sync.acked),
            missing=sync.missing,
            failed=sync.failed,
            acked_capacity=sync.acked_capacity,
            eligible_capacity=sync.eligible_capacity,
            timed_out=verdict.timed_out,
            reason=verdict.reason,
            elapsed_s=now - sync.started,
        )

    # --- telling -------------------------------------------------------------------------

    async def tell_replicas(self, message: m.FromAcceptor) -> None:
        await _tell(self.links.values(), message)

    async def tell_trainer(self, message: m.FromAcceptor) -> None:
        if self.trainer is not None:
            await _tell([self.trainer], message)

    def snapshot(self, now: float) -> m.Fleet:
        """The fleet for the trainer's agent."""
        rows = [_row(link, now) for link in self.links.values()]
        up = [r for r in self.fleet if r.state in (State.READY, State.SUSPECT)]
        return m.Fleet(
            ready=len(up),
            registered=len(self.links),
            capacity=sum(r.capacity for r in up),
            engine=self.engine(),
            replicas=rows,
            waiting=self.holding.waiting,
            held_s=self.holding.total_s(now),
            routed=dict(self.routed),
            retried=self.retried,
        )


async def _tell(links: Iterable[ReplicaLink | TrainerSeat], message: m.FromAcceptor) -> None:
    """Send to each; a link that is just ending misses it and will catch up by itself.

    Whoever asked for it may go away meanwhile, which must not leave some of them untold. Sending
    only queues, unless a peer reads nothing, and that one's own link ends by its deadline.
    """
    for link in list(links):
        with trio.move_on_after(TELL_S, shield=True) as scope:
            try:
                await link.control.send(message)
            except LinkError as error:
                log.debug("control.unsent", message=type(message).__name__, reason=str(error))
        if scope.cancelled_caught:
            log.warning("control.stuck", run_message=type(message).__name__)


def _row(link: ReplicaLink, now: float) -> m.ReplicaRow:
    replica = link.replica
    return m.ReplicaRow(
        name=replica.name,
        state=replica.state.value,
        reason=replica.reason,
        since_s=now - replica.since,
        capacity=replica.capacity,
        in_flight=replica.in_flight,
        requests=replica.requests,
        failures=replica.failures,
        loaded=sorted(replica.loaded),
        tokens_per_s=replica.tokens_per_s,
        rtt_ms=1000 * (link.link.rtt_s or 0.0),
        paused_s=replica.paused_s,
    )
