"""A fleet in virtual time, placed by the real router: an event queue, no clock, no IO.

The load is that of GRPO: groups of G equal prompts, log-normal lengths, a fixed number in flight,
and a new version after each step, while rollouts of the one before still run. What happens before
the second version is asked for, and after the last group has been sent, is left out of the figures
of balance and time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, quantiles

from msgspec.structs import replace

from asyncgrpo_agent.core import placement, replicas
from asyncgrpo_agent.core.placement import Demand
from asyncgrpo_agent.core.replicas import Fleet
from asyncgrpo_agent.core.routing import Choice, PrefixRouter
from fakes.simulated_engines import BLOCK_TOKENS, Box, Engine, Faults, Load, Rollout

PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """`p50` and `p99`: a rollout's seconds over what it takes when all work is spread perfectly."""

    rollouts: int
    affinity: float
    spill: float
    imbalance: float  # of mean tokens in flight: (most - least) / mean
    p50: float
    p99: float
    elapsed_s: float
    retried: int
    requests: dict[str, int]  # by replica
    failures: dict[str, int]
    lately: dict[str, float]  # share of the rollouts of the last step, by replica
    peak_at_first: dict[str, int]  # most in flight in a replica's first second
    wrong_version: int  # rollouts sent to a replica that lacks theirs
    open: int  # by the replicas' counters, at the end

    def __str__(self) -> str:
        return (
            f"{self.rollouts:6d} rollouts  affinity {self.affinity:6.1%}  spill {self.spill:5.2%}"
            f"  imbalance {self.imbalance:6.1%}  p50 {self.p50:5.2f}  p99 {self.p99:5.2f}"
            f"  elapsed {self.elapsed_s:6.0f} s  retried {self.retried}"
        )


Policy = Callable[["SimulatedFleet", Demand, float], Choice | None]


def by_router(site: SimulatedFleet, demand: Demand, now: float) -> Choice | None:
    return placement.place(site.fleet, site.router, demand, None, now)


def least_loaded(site: SimulatedFleet, demand: Demand, now: float) -> Choice | None:
    able = placement.candidates(site.fleet, demand, None, now)
    if not able:
        return None
    best = min(able, key=lambda replica: (replica.in_flight_tokens, replica.name))
    return Choice(replica=best.name, why="least loaded")


def at_random(site: SimulatedFleet, demand: Demand, now: float) -> Choice | None:
    able = placement.candidates(site.fleet, demand, None, now)
    return Choice(replica=site.rng.choice(able).name, why="least loaded") if able else None


class SimulatedFleet:
    """Runs one load through one fleet by one policy."""

    def __init__(
        self,
        engines: dict[str, Engine],
        load: Load,
        *,
        faults: Faults | None = None,
        policy: Policy = by_router,
        seed: int = 1,
    ) -> None:
        self.load, self.faults, self.policy = load, faults or Faults(), policy
        self.rng = Random(seed)
        self.fleet, self.router = Fleet(), PrefixRouter()
        self.boxes: dict[str, Box] = {}
        self.gone: list[Box] = []
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._todo: deque[Rollout] = deque()
        self._held: deque[Rollout] = deque()
        self._open = 0
        self._groups = self._published = self.rollouts = 0
        self._measured_from_s = math.inf
        self._work: dict[str, float] = {}
        self.version = ""
        self.why: Counter[str] = Counter()
        self._lately: Counter[str] = Counter()
        self.stretch: list[float] = []
        self.retried = self.wrong_version = 0
        self.pace_s = _ideal_pace_s(list(engines.values()), load.in_flight)
        for name, engine in engines.items():
            self._join(name, engine)
        for at_s, name in self.faults.leaves:
            self._at(at_s, lambda name=name: self._leave(name))  # type: ignore[misc]
        for at_s, name, engine in self.faults.joins:
            self._at(at_s, lambda name=name, engine=engine: self._join(name, engine))  # type: ignore[misc]

    # --- the run -------------------------------------------------------------------------

    def run(self) -> Figures:
        self._publish()
        while self._events and (self._open or self._todo or self._more):
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self._figures()

    @property
    def _more(self) -> bool:
        return self._groups < self.load.steps * self.load.groups_per_step

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, event))

    def _publish(self) -> None:
        """A new version; rollouts ask for it once half of the fleet has it."""
        self._published += 1
        version, loading = f"v{self._published}", sorted(self.boxes)
        acks_s = [self.rng.uniform(0.5, 2.0) for _ in loading]
        for name, ack_s in zip(loading, acks_s, strict=True):
            self._at(self.now + ack_s, lambda name=name: self._loaded(name, version))  # type: ignore[misc]
        quorum_s = sorted(acks_s)[(len(acks_s) - 1) // 2]
        self._at(self.now + quorum_s, lambda: self._use(version))

    def _loaded(self, name: str, version: str) -> None:
        if box := self.boxes.get(name):
            box.replica.loaded |= {version}
            self._place_held()

    def _use(self, version: str) -> None:
        self.version = version
        self.router.retire(f"v{self._published - 3}")
        if self._published == 2:
            self._start_measuring()
        self._fill()

    def _start_measuring(self) -> None:
        self._measured_from_s = self.now
        for box in self.boxes.values():
            box.advance(self.now)
            box.work_s = 0.0

    def _stop_measuring(self) -> None:
        for name, box in self.boxes.items():
            box.advance(self.now)
            self._work[name] = box.work_s

    def _next_group(self) -> None:
        load, tokens = self.load, self.rng.randint(*self.load.prompt_tokens)
        blocks = self._blocks(min(load.shared_blocks, tokens // BLOCK_TOKENS), tokens)
        demand = Demand(model=self.version, tokens=tokens + load.max_tokens, blocks=tuple(blocks))
        self._todo.extend(self._rollout(demand, tokens, 1) for _ in range(load.group_size))
        self._groups += 1
        if self._groups == load.steps * load.groups_per_step:
            self._stop_measuring()
        elif self._groups % load.groups_per_step == 0:
            self._publish()

    def _blocks(self, shared: int, tokens: int) -> list[int]:
        own = tokens // BLOCK_TOKENS - shared
        return [*range(1, shared + 1), *(self.rng.getrandbits(48) for _ in range(own))]

    def _rollout(self, demand: Demand, prompt_tokens: int, turn: int) -> Rollout:
        load = self.load
        length = int(self.rng.lognormvariate(math.log(load.median_tokens), load.spread))
        length = min(max(1, length), load.max_tokens)
        return Rollout(demand, length, prompt_tokens, turn)

    # --- placing -------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._open < self.load.in_flight and (self._todo or self._more):
            if not self._todo:
                self._next_group()
            rollout = self._todo.popleft()
            rollout.asked_s = self.now
            self._open += 1
            self._place(rollout)

    def _place(self, rollout: Rollout) -> None:
        choice = self.policy(self, rollout.demand, self.now)
        if choice is None:
            self._held.append(rollout)
            self._at(self.now + replicas.PROBE_EVERY_S, self._place_held)
            return
        self.why[choice.why] += 1
        box = self.boxes[choice.replica]
        self.wrong_version += rollout.demand.model not in box.replica.loaded
        box.advance(self.now)
        replicas.started(box.replica, rollout.demand.tokens, self.now)
        if self.now - box.joined_s <= 1.0:
            box.peak_at_first = max(box.peak_at_first, box.replica.in_flight)
        if self._published == self.load.steps:
            self._lately[choice.replica] += 1
        if self._fails(choice.replica):
            self._at(self.now + 0.005, lambda: self._refused(box, rollout))
            return
        end = box.served + rollout.length + box.prefill(rollout)
        self._serial += 1
        heapq.heappush(box.running, (end, self._serial, rollout))
        self._await_end(box)

    def _fails(self, name: str) -> bool:
        faults = self.faults
        at_it = name in faults.fails_at_once and faults.from_s <= self.now < faults.until_s
        return at_it and self.rng.random() < faults.share

    def _place_held(self) -> None:
        held, self._held = self._held, deque()
        for rollout in held:
            self._place(rollout)

    def _refused(self, box: Box, rollout: Rollout) -> None:
        box.advance(self.now)
        replicas.finished(box.replica, rollout.demand.tokens, ok=False, now=self.now)
        self._again(rollout, box.replica.name)

    def _again(self, rollout: Rollout, failed: str) -> None:
        self.retried += 1
        rollout.demand = replace(rollout.demand, tried=rollout.demand.tried | {failed})
        self._place(rollout)

    # --- engines -------------------------------------------------------------------------

    def _await_end(self, box: Box) -> None:
        box.epoch += 1
        if box.running:
            epoch = box.epoch
            self._at(box.next_end_s(), lambda: self._ended(box, epoch))

    def _ended(self, box: Box, epoch: int) -> None:
        if epoch != box.epoch:
            return
        box.advance(self.now)
        rollout = heapq.heappop(box.running)[2]
        replicas.finished(box.replica, rollout.demand.tokens, ok=True, now=self.now)
        self._await_end(box)
        self._open -= 1
        self.rollouts += 1
        if rollout.asked_s >= self._measured_from_s:
            self.stretch.append((self.now - rollout.asked_s) / (rollout.length * self.pace_s))
        if rollout.turn < self.load.turns:
            self._todo.appendleft(self._continued(rollout))
        self._place_held()
        self._fill()

    def _continued(self, rollout: Rollout) -> Rollout:
        """The next turn: all that was said so far, and something more."""
        said = rollout.length + 64
        blocks = (*rollout.demand.blocks, *self._blocks(0, said))
        demand = replace(
            rollout.demand, tokens=rollout.demand.tokens + said, blocks=blocks, tried=frozenset()
        )
        return self._rollout(demand, rollout.prompt_tokens + said, rollout.turn + 1)

    def _report(self, box: Box) -> None:
        if self.boxes.get(box.replica.name) is not box:
            return
        box.advance(self.now)
        replicas.progressed(box.replica, len(box.running), int(box.made), self.now)
        replicas.check_progress(box.replica, self.now)
        self._at(self.now + PROGRESS_S, lambda: self._report(box))

    # --- the fleet -----------------------------------------------------------------------

    def _join(self, name: str, engine: Engine) -> None:
        replica = self.fleet.join(name, f"{name}@{self.now}", engine.capacity, self.now)
        replicas.engine_up(replica, self.now)
        box = self.boxes[name] = Box(engine, replica, at_s=self.now, joined_s=self.now)
        if self.version:
            replica.loaded = frozenset({self.version})
        self._at(self.now + self.rng.uniform(0, PROGRESS_S), lambda: self._report(box))
        self._place_held()

    def _leave(self, name: str) -> None:
        box = self.boxes.pop(name)
        box.advance(self.now)
        self.gone.append(box)
        self.fleet.leave(name, box.replica.instance, self.now, "killed")
        self.router.forget(name)
        lost, box.running, box.epoch = box.running, [], box.epoch + 1
        for _, _, rollout in sorted(lost):
            replicas.finished(box.replica, rollout.demand.tokens, ok=False, now=self.now)
            self._again(rollout, name)

    # --- what came of it -----------------------------------------------------------------

    def _figures(self) -> Figures:
        placed = self.why.total()
        work = [self._work[name] for name in sorted(self._work)]
        percent = quantiles(self.stretch, n=100)
        return Figures(
            rollouts=self.rollouts,
            affinity=self.why["affinity"] / placed,
            spill=self.why["spill"] / placed,
            imbalance=(max(work) - min(work)) / fmean(work),
            p50=percent[49],
            p99=percent[98],
            elapsed_s=self.now,
            retried=self.retried,
            requests={name: box.replica.requests for name, box in self.boxes.items()},
            failures={name: box.replica.failures for name, box in self.boxes.items()},
            lately={name: self._lately[name] / self._lately.total() for name in self.boxes},
            peak_at_first={name: box.peak_at_first for name, box in self.boxes.items()},
            wrong_version=self.wrong_version,
            open=sum(box.replica.in_flight for box in [*self.boxes.values(), *self.gone]),
        )


def _ideal_pace_s(engines: Sequence[Engine], in_flight: int) -> float:
    """Seconds per token when rollouts are spread so that all engines have the same pace."""
    low, high = 0.0, max(engine.pace_s(in_flight) for engine in engines)
    for _ in range(60):
        pace_s = (low + high) / 2
        room = sum(max(0.0, (pace_s - engine.token_s) / engine.crowd_s) for engine in engines)
        low, high = (low, pace_s) if room > in_flight else (pace_s, high)
    return high


def compare(
    engines: dict[str, Engine], load: Load, faults: Faults | None = None, seed: int = 1
) -> dict[str, Figures]:
    """The same load by the router and by two simpler policies."""
    return {
        policy.__name__: SimulatedFleet(
            engines, load, faults=faults, policy=policy, seed=seed
        ).run()
        for policy in (by_router, least_loaded, at_random)
    }
