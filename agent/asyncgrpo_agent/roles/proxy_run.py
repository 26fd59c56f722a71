"""One run as the proxy serves it: its replicas, its trainer, its adapters, its syncs.

Everything here happens in the proxy's one thread between checkpoints, so the state needs no lock.
Decisions come from `core`; this module performs them on control channels and logs the reasons. It
must not touch sockets or parse bodies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core.adapters import NameParts, parse_name
from asyncgrpo_agent.core.alerts import Board, Tries
from asyncgrpo_agent.core.contract import Terms
from asyncgrpo_agent.core.replicas import Fleet, State, Transition
from asyncgrpo_agent.core.retention import NAMED_S
from asyncgrpo_agent.core.retries import RetryBudget
from asyncgrpo_agent.core.routing import PrefixRouter
from asyncgrpo_agent.core.sync import Sync
from asyncgrpo_agent.core.upstreams import EdgeLimit
from asyncgrpo_agent.core.usage import Usage
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.proxy_holding import Bell, Holding
from asyncgrpo_agent.roles.proxy_links import ProxyChannel as ProxyChannel
from asyncgrpo_agent.roles.proxy_links import ReplicaLink as ReplicaLink
from asyncgrpo_agent.roles.proxy_links import TrainerSeat as TrainerSeat
from asyncgrpo_agent.roles.proxy_links import tell
from asyncgrpo_agent.roles.proxy_story import RunStory
from asyncgrpo_agent.roles.proxy_view import rows_of
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

ASK_EVERY_S: Final = 5.0


@dataclass(slots=True)
class ProxyRun:
    """The proxy's state of one run. `attempt` is empty until a trainer has registered."""

    name: str
    attempt: str = ""
    attempt_seen: int = 0  # the highest that any agent knows of, also of an earlier proxy
    terms: Terms = field(default_factory=Terms)  # of its trainer
    fleet: Fleet = field(default_factory=Fleet)
    links: dict[str, ReplicaLink] = field(default_factory=dict)
    trainer: TrainerSeat | None = None
    router: PrefixRouter = field(default_factory=PrefixRouter)
    known: dict[str, m.Announce] = field(default_factory=dict)  # by physical name
    live: list[str] = field(default_factory=list)
    syncs: dict[str, Sync] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)  # by physical name
    _wanted_at: dict[str, float] = field(default_factory=dict)  # the same, whoever has heard of it
    holding: Holding = field(default_factory=Holding)
    routed: Counter[str] = field(default_factory=Counter)
    retries: RetryBudget = field(default_factory=RetryBudget)
    usage: Usage = field(default_factory=Usage)
    limits: dict[str, EdgeLimit] = field(default_factory=dict)  # of upstreams, by replica
    finished: str = ""  # why the run is over
    story: RunStory = field(default_factory=RunStory)
    alerts: Board = field(default_factory=Board)
    tries: Tries = field(default_factory=Tries)
    dismissed: dict[str, str] = field(default_factory=dict)  # processes that are to go, and why
    wanted: Bell = field(default_factory=Bell)  # rings when an adapter may be needed somewhere
    _changed: trio.Event = field(default_factory=trio.Event)

    # --- waking those who wait -----------------------------------------------------------

    def wake(self) -> None:
        """Something changed that held rollouts, a sync or the trainer may wait for."""
        self.holding.call_all()
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self, deadline: float) -> bool:
        """Wait for the next change; False when the deadline (trio clock) passed first."""
        with trio.move_on_at(deadline) as scope:
            await self._changed.wait()
        return not scope.cancelled_caught

    # --- replicas ------------------------------------------------------------------------

    def engine(self) -> m.EngineFacts | None:
        """What all engines of the run share, with the fleet's smallest limits."""
        facts = [link.engine for link in self.links.values() if link.engine is not None]
        if not facts:
            return None
        facts.sort(key=lambda f: bool(f.quantization))  # the trainer compares with the plain ones
        return msgspec.structs.replace(
            facts[0],
            max_model_len=min(f.max_model_len for f in facts),
            max_loras=min(f.max_loras for f in facts),
            max_lora_rank=min(f.max_lora_rank for f in facts),
            max_cpu_loras=min(f.max_cpu_loras for f in facts),
        )

    @property
    def link_sources(self) -> int:
        """Replicas whose adapters come over their links."""
        return sum(link.source == "link" for link in self.links.values())

    def note(self, transition: Transition | None) -> None:
        """Log a change of state and let everybody look again."""
        if transition is None:
            return
        lost = transition.after is State.GONE and transition.before is not State.DRAINING
        is_lost = lost or transition.after is State.SUSPECT
        is_last = is_lost and not any(r.state is State.READY for r in self.fleet)
        level = log.error if is_last else log.warning if is_lost else log.info
        level(
            "replica.state",
            run=self.name,
            replica=transition.replica,
            before=transition.before.value,
            after=transition.after.value,
            reason=transition.reason,
            **({"ready": 0} if is_last else {}),
        )
        self.story.moved(transition, is_last=is_last)
        link = self.links.get(transition.replica)
        if transition.after is State.SUSPECT and link is not None and link.replica.hangs:
            link.give_up_on_answers()
        if transition.after is State.READY:
            self.asked_at.clear()  # it has not heard what the others were asked for
        self.wake()

    def leave(self, gone: ReplicaLink, reason: str, now: float) -> None:
        """The link of a replica ended, or lost its name, which then may be another's already."""
        name = gone.replica.name
        if self.links.get(name) is not gone:
            return
        self._charge(gone, now)
        del self.links[name]
        self.router.forget(name)
        self.note(self.fleet.leave(name, gone.replica.instance, now, reason))
        for sync in self.syncs.values():
            sync.gone(name)
        self.wake()

    def charge(self, now: float) -> None:
        """Count the time of all replicas up to `now`."""
        for link in self.links.values():
            self._charge(link, now)

    def _charge(self, link: ReplicaLink, now: float) -> None:
        self.usage.charge(max(0.0, now - link.charged_to), link.price_per_hour)
        link.charged_to = now

    # --- adapters ------------------------------------------------------------------------

    async def publish(self, message: m.Published) -> Sync:
        """An adapter is durable: count the capacity, announce it, and follow the acks."""
        announce = m.Announce(message.adapter, message.commit, message.live, message.folder)
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
        self.story.published(message)
        self.wanted.ring()
        await self.tell_replicas(announce)
        self.wake()
        return sync

    def _set_live(self, live: list[str]) -> None:
        self.live = list(live)
        # A retired adapter may still be asked for; what left the window long ago may not, unless
        # it is: an evaluation goes on naming its version.
        since = trio.current_time() - NAMED_S
        for name in list(self.known)[: -4 * max(1, len(live))]:
            if name not in self.live and self._wanted_at.get(name, -math.inf) < since:
                del self.known[name]
                self.syncs.pop(name, None)
                self.asked_at.pop(name, None)
                self._wanted_at.pop(name, None)

    def has_forgotten(self, name: NameParts) -> bool:
        """Whether it is older than all that are known: nobody tells of it again."""
        known = [parts.version for one in self.known if (parts := parse_name(one)) is not None]
        return bool(known) and name.version < min(known)

    async def retire(self, message: m.Retired) -> None:
        self._set_live(message.live)
        for name in message.names:
            self.router.retire(name)
        await self.tell_replicas(m.Retire(message.names, message.live))

    async def ask_for(self, name: str) -> None:
        """A rollout names an adapter that no ready replica holds: have it loaded again.

        It may be retired, or its only holders are gone; replicas load the newest by themselves and
        older ones when they are asked. Asked again now and then, for replicas come and go.
        """
        now = self._wanted_at[name] = trio.current_time()
        if now - self.asked_at.get(name, -math.inf) < ASK_EVERY_S:
            return
        self.asked_at[name] = now
        announce = self.known[name]
        if name not in self.live:
            self.live = [name, *self.live]
        self.wanted.ring()
        await self.tell_replicas(msgspec.structs.replace(announce, live=self.live))

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
        self.story.acked(name, ack, since_s)
        await self.tell_trainer(m.ReplicaAck(name, ack, since_s))

    def report(self, sync: Sync, adapter: m.Adapter, now: float) -> m.SyncReport:
        standing = {name: link.awaited.get(adapter.name, "") for name, link in self.links.items()}
        verdict = sync.verdict(now, standing)
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
        await tell(self.links.values(), message)

    async def tell_trainer(self, message: m.FromAcceptor) -> None:
        if self.trainer is not None:
            await tell([self.trainer], message)

    def snapshot(self, now: float) -> m.Fleet:
        """The fleet for the trainer's agent."""
        self.charge(now)
        up = [r for r in self.fleet if r.state in (State.READY, State.SUSPECT)]
        return m.Fleet(
            ready=len(up),
            registered=len(self.links),
            capacity=sum(r.capacity for r in up),
            engine=self.engine(),
            replicas=rows_of(self.links.values(), now),
            waiting=self.holding.waiting,
            held_s=self.holding.total_s(now),
            routed=dict(self.routed),
            retried=self.retries.retried,
            link_sources=self.link_sources,
            duplicates=self.retries.duplicates,
            delayed=self.retries.delayed,
            refused=self.holding.refused,
            replica_hours=self.usage.replica_hours,
            unpriced_hours=self.usage.unpriced_hours,
            cost=self.usage.cost,
        )


class Runs(dict[str, ProxyRun]):
    """All runs of one proxy by name."""

    def __init__(self, usage_of: Callable[[str], Usage] | None = None) -> None:
        super().__init__()
        self._usage_of = usage_of or (lambda _: Usage())

    def open(self, name: str) -> ProxyRun:
        """The run of that name, made if nobody has asked for it before."""
        run = self.get(name)
        if run is None:
            run = self[name] = ProxyRun(name, usage=self._usage_of(name))
        return run
