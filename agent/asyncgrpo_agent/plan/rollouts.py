"""Rollouts of a part of the fleet, placed one by one by the real router.

As many replicas as the inputs say carry rollouts, with their share of what is in flight; a fleet of
hundreds is many such parts. The trainer's own speed, staleness, lost replicas and the wait for an
adapter are as in a run: a rollout that no replica can take is held, one whose replica dies is
placed again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from msgspec.structs import replace

from asyncgrpo_agent.core import placement, replicas
from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import Fleet, Replica
from asyncgrpo_agent.core.routing import PrefixRouter
from asyncgrpo_agent.plan.engines import Box, Pace, Rollout
from asyncgrpo_agent.plan.inputs import Inputs
from asyncgrpo_agent.plan.timeline import Process, Timeline

PROGRESS_S: Final = 2.0  # between two reports of an engine's counters
TICK_S: Final = 1.0  # between two looks at what waits
ASK_S: Final = 5.0  # between two calls for an adapter that nobody has


@dataclass(slots=True, kw_only=True)
class Sums:
    """Since the measuring began. The shares are sums over ticks."""

    rollouts: int = 0
    tokens: float = 0.0
    stale: int = 0  # finished, and too old for the trainer
    retried: int = 0
    placed: int = 0
    affinity: int = 0
    ticks: int = 0
    up: float = 0.0  # of the placed replicas, with their engine up
    held: float = 0.0  # rollouts that waited in the proxy, of all slots
    full_ticks: int = 0  # in which the trainer's queue was full


@dataclass(eq=False)
class Rollouts:
    """`use` begins it. `released` hears of each name that no rollout in flight names any more;
    `wanted` of a name that none of the replicas has."""

    inputs: Inputs
    timeline: Timeline
    rng: Random
    released: Callable[[], None]
    wanted: Callable[[str], None]
    fleet: Fleet = field(default_factory=Fleet)
    router: PrefixRouter = field(default_factory=PrefixRouter)
    boxes: dict[str, Box] = field(default_factory=dict)
    naming: Counter[str] = field(default_factory=Counter)  # rollouts in flight, by adapter
    in_use: dict[str, Counter[str]] = field(default_factory=dict)  # the same by replica
    sums: Sums = field(default_factory=Sums)
    _name: str = ""
    _version: int = 0
    _todo: deque[Rollout] = field(default_factory=deque)
    _held: deque[Rollout] = field(default_factory=deque)
    _open: int = 0
    _queued: float = 0.0  # samples that wait for the trainer
    _taken_at: float = 0.0
    _groups: int = 0
    _serial: int = 0
    _made_before: float = 0.0  # tokens, of replicas that are gone or from before the measuring
    _asked_at: float = -math.inf

    def __post_init__(self) -> None:
        self._pace = Pace.of(self.inputs.engine)
        share = self.inputs.placed / self.inputs.replicas
        self._samples_per_s = self.inputs.load.samples_per_s * share
        self._limit = self.inputs.placed_in_flight
        load = self.inputs.load
        self._median = load.completion_tokens / math.exp(load.spread**2 / 2)

    # --- what others tell ---------------------------------------------------------------------

    def use(self, name: str, version: int) -> None:
        """The sync has ended: new rollouts name this adapter."""
        is_first = not self._name
        self._name, self._version = name, version
        if is_first:
            self.timeline.start(self._ticks())
        self._fill()

    def retire(self, name: str) -> None:
        self.router.retire(name)

    def joined(self, replica: Replica) -> Counter[str]:
        """Its engine is up. The result counts the rollouts there by the adapter they name."""
        box = Box(self._pace, replica, self.inputs.load.prompt_tokens, self.timeline.now)
        self.boxes[replica.name] = box
        in_use: Counter[str] = Counter()
        self.in_use[replica.name] = in_use
        self.timeline.start(self._reports(box))
        return in_use

    def lost(self, name: str) -> None:
        """What ran there is placed again."""
        box = self.boxes.pop(name)
        box.advance(self.timeline.now)
        self._made_before += box.made - box.prefilled
        self.router.forget(name)
        del self.in_use[name]
        lost, box.running, box.epoch = box.running, [], box.epoch + 1
        for _, _, rollout in sorted(lost, key=lambda row: row[:2]):
            self._finish(box, rollout, ok=False)
            self.sums.retried += 1
            rollout.demand = replace(rollout.demand, tried=rollout.demand.tried | {name})
            self._place(rollout)

    def changed(self) -> None:
        """A replica holds something new: what is held may fit now."""
        held, self._held = self._held, deque()
        for rollout in held:
            self._place(rollout)

    def measure(self) -> None:
        """From now on."""
        self.sums = Sums()
        self._made_before = -self._made(self.timeline.now)

    def total(self) -> Sums:
        self.sums.tokens = self._made_before + self._made(self.timeline.now)
        return self.sums

    def _made(self, now: float) -> float:
        for box in self.boxes.values():
            box.advance(now)
        return sum(box.made - box.prefilled for box in self.boxes.values())

    # --- asking -------------------------------------------------------------------------------

    def _fill(self) -> None:
        self._take()
        while self._open < self._limit and self._queued < self._limit:
            if not self._todo:
                self._todo.extend(self._group())
            self._open += 1
            self._ask(self._todo.popleft())

    def _take(self) -> None:
        """What the trainer has taken meanwhile."""
        now = self.timeline.now
        if self._samples_per_s:
            taken = (now - self._taken_at) * self._samples_per_s
            self._queued = max(0.0, self._queued - taken)
        else:
            self._queued = 0.0
        self._taken_at = now

    def _group(self) -> list[Rollout]:
        self._groups += 1
        load = self.inputs.load
        found = []
        for _ in range(load.group):
            drawn = self.rng.lognormvariate(math.log(self._median), load.spread)
            length = max(1, min(round(drawn), load.max_tokens))
            demand = Demand(
                model=self._name,
                tokens=load.prompt_tokens + load.max_tokens,
                blocks=(self._groups,),
            )
            found.append(Rollout(demand, length, self._version))
        return found

    def _ask(self, rollout: Rollout) -> None:
        """With the newest adapter: also one whose group began with another."""
        rollout.demand = replace(rollout.demand, model=self._name)
        rollout.version = self._version
        self.naming[self._name] += 1
        self._place(rollout)

    def _place(self, rollout: Rollout) -> None:
        now = self.timeline.now
        choice = placement.place(self.fleet, self.router, rollout.demand, None, now)
        if choice is None:
            self._held.append(rollout)
            return
        box, demand = self.boxes[choice.replica], rollout.demand
        self.sums.placed += 1
        self.sums.affinity += choice.why == "affinity"
        box.advance(now)
        replicas.started(box.replica, demand.tokens, now)
        self.in_use[choice.replica][demand.model] += 1
        self._serial += 1
        box.take(rollout, self._serial)
        self._await_end(box)

    # --- engines ------------------------------------------------------------------------------

    def _await_end(self, box: Box) -> None:
        box.epoch += 1
        if box.running:
            epoch = box.epoch
            self.timeline.at(box.next_end_s(), lambda: self._ended(box, epoch))

    def _ended(self, box: Box, epoch: int) -> None:
        if epoch != box.epoch:
            return
        box.advance(self.timeline.now)
        rollout = heapq.heappop(box.running)[2]
        self._finish(box, rollout, ok=True)
        self._await_end(box)
        self._open -= 1
        self.sums.rollouts += 1
        name = rollout.demand.model
        self.naming[name] -= 1
        if not self.naming[name]:
            del self.naming[name]
            if name != self._name:
                self.released()
        if self._version - rollout.version > self.inputs.max_staleness:
            self.sums.stale += 1
        else:
            self._queued += 1
        if self._held:
            self.changed()
        self._fill()

    def _finish(self, box: Box, rollout: Rollout, *, ok: bool) -> None:
        name, demand = box.replica.name, rollout.demand
        replicas.finished(box.replica, demand.tokens, ok=ok, now=self.timeline.now)
        if in_use := self.in_use.get(name):
            in_use[demand.model] -= 1
            if not in_use[demand.model]:
                del in_use[demand.model]

    def _reports(self, box: Box) -> Process:
        """Its counters, as its agent sends them."""
        yield self.rng.uniform(0, PROGRESS_S)
        while self.boxes.get(box.replica.name) is box:
            now = self.timeline.now
            box.advance(now)
            replicas.progressed(box.replica, len(box.running), int(box.made), now)
            replicas.check_progress(box.replica, now)
            yield PROGRESS_S

    def _ticks(self) -> Process:
        slots = self.inputs.placed * self.inputs.engine.slots
        while True:
            self._fill()
            self._call_for_missing()
            self.sums.ticks += 1
            self.sums.up += len(self.boxes) / self.inputs.placed
            self.sums.held += min(1.0, len(self._held) / slots)
            self.sums.full_ticks += self._queued >= self._limit
            yield TICK_S

    def _call_for_missing(self) -> None:
        now = self.timeline.now
        if self._held and now - self._asked_at >= ASK_S:
            self._asked_at = now
            for name in {rollout.demand.model for rollout in self._held}:
                self.wanted(name)
            self.changed()
