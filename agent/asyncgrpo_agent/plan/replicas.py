"""A simulated replica's adapters: looks, stages, loads and acks, as `roles.replica_adapters` does.

What is loaded, when, and what for is decided by the real `plan_reconcile`, and when it looks next
by the real `looks`. Only what takes time on a real host is played: S3, sha256, vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, Final

from asyncgrpo_agent.core import adapters as decide
from asyncgrpo_agent.core import looks
from asyncgrpo_agent.core.adapters import AdapterId, Listed, commit_key
from asyncgrpo_agent.core.replicas import Replica
from asyncgrpo_agent.plan.inputs import MB, Inputs
from asyncgrpo_agent.plan.mount import ATTEMPT, Mount
from asyncgrpo_agent.plan.timeline import Process, Signal, Steps, Timeline, Until

RUN: Final = "plan"
UNLOAD_S: Final = 0.005
MOST_PLANS: Final = 4096
KEPT_COMMITS: Final = 64
HOST_SPREAD: Final = 0.1  # sigma of the logarithm of hosts' speeds


@dataclass(frozen=True, slots=True)
class Version:
    """One publication."""

    adapter: AdapterId
    visible_at_s: float  # from then on a listing shows it

    @property
    def row(self) -> Listed:
        return self.adapter, commit_key(ATTEMPT, self.adapter.version)


@dataclass(slots=True)
class Shelf:
    """What the trainer has published, and what the run still names."""

    versions: list[Version] = field(default_factory=list)  # the live ones, oldest first
    live: list[str] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)  # the live ones' numbers

    def add(self, version: Version) -> None:
        self.versions.append(version)
        self.keep([*self.live, version.adapter.name])

    def keep(self, live: list[str]) -> None:
        self.live = live
        self.versions = [one for one in self.versions if one.adapter.name in live]
        self.wanted = {one.adapter.version for one in self.versions}

    def visible(self, now: float) -> list[Version]:
        """Newest first."""
        return [one for one in reversed(self.versions) if one.visible_at_s <= now]


@dataclass(slots=True)
class Plans:
    """The real plan for what replicas see. It is pure, and most of them see the same."""

    max_held: int
    _known: dict[Any, list[decide.Decision]] = field(default_factory=dict)

    def of(
        self,
        listed: list[Listed],
        staged: set[str],
        loaded: list[str],
        in_use: set[str],
        live: list[str],
        high_water: int,
        retired_before: set[str],
        ever_loaded: set[str],
    ) -> list[decide.Decision]:
        seen = (
            *(tuple(adapter.version for adapter, _ in listed), tuple(loaded), tuple(live)),
            *(frozenset(staged), frozenset(in_use), high_water),
            *(frozenset(retired_before), frozenset(ever_loaded)),
        )
        if seen not in self._known:
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            self._known[seen] = decide.plan_reconcile(
                run=RUN,
                attempt=ATTEMPT,
                listed=listed,
                staged=staged,
                loaded=loaded,
                in_use=in_use,
                live=live,
                high_water=(1, high_water),
                max_held=self.max_held,
                retired_before=retired_before,
                ever_loaded=ever_loaded,
            )
        return self._known[seen]


@dataclass(slots=True)
class Phases:
    """When a replica came how far with one adapter, in virtual seconds."""

    announced: float = 0.0
    visible: float = 0.0
    staged: float = 0.0
    hashed_s: float = 0.0
    loaded: float = 0.0


@dataclass(eq=False)
class Loader:
    """One registration of one replica. `acked` is called when the proxy has heard."""

    replica: Replica
    inputs: Inputs
    shelf: Shelf
    plans: Plans
    timeline: Timeline
    mount: Mount
    rng: Random
    acked: Callable[[Loader, AdapterId, Phases], None]
    in_use: Counter[str] = field(default_factory=Counter)
    loaded: list[str] = field(default_factory=list)
    skipped: int = 0  # versions that it never had
    _asked: set[str] = field(default_factory=set)
    _phases: dict[str, Phases] = field(default_factory=dict)
    _awaited: dict[str, float] = field(default_factory=dict)
    _known: dict[int, Listed] = field(default_factory=dict)
    _staged: set[str] = field(default_factory=set)
    _unloaded: set[str] = field(default_factory=set)
    _unloaded_now: set[str] = field(default_factory=set)
    _given: set[str] = field(default_factory=set)
    _high_water: int = 0
    _has_news: bool = True
    _wake: Signal = field(default_factory=Signal)

    @cached_property
    def slowness(self) -> float:
        """Hosts differ a little."""
        return self.rng.lognormvariate(0.0, HOST_SPREAD)

    # --- what others tell ---------------------------------------------------------------------

    def announced(self, adapter: AdapterId) -> None:
        if adapter.name not in self.loaded:
            now = self.timeline.now
            self._asked.add(adapter.name)
            self._awaited.setdefault(adapter.name, now)
            self._phases.setdefault(adapter.name, Phases(announced=now))
        self.wake()

    def retired(self) -> None:
        self._asked &= set(self.shelf.live)
        self.wake()

    def wake(self) -> None:
        self._has_news = True
        self.timeline.fire(self._wake)

    # --- rounds -------------------------------------------------------------------------------

    def run(self) -> Process:
        """For as long as the replica lives."""
        while True:
            now = self.timeline.now
            if not self._has_news:
                pause_s = looks.pause_s(
                    watched=False,
                    linked=True,
                    retries_s=[],
                    awaited_s=[now - since for since in self._awaited.values()],
                )
                yield Until(self._wake, now + pause_s)
            self._has_news = False
            listed = yield from self._look()
            yield from self._reconcile(listed)
            kept = {*self.shelf.live, *self.loaded, *self._asked}
            for name in self._phases.keys() - kept:
                del self._phases[name]
            self._given &= self._staged

    def _look(self) -> Steps[list[Listed]]:
        wanted = self.shelf.wanted
        unseen = wanted - self._known.keys()
        oldest = min(unseen, default=max(wanted, default=self._high_water))
        newest = self.shelf.versions[-1].adapter.version if self.shelf.versions else 0
        yield from self.mount.list_commits(oldest, newest)
        rows: list[Listed] = []
        for version in self.shelf.visible(self.timeline.now):
            adapter, number = version.adapter, version.adapter.version
            if number < oldest or (rows and number not in wanted):
                continue
            if number not in self._known:
                yield from self.mount.read_commit(number)
                self._known[number] = version.row
                at = self._phases.setdefault(adapter.name, Phases(announced=self.timeline.now))
                at.visible = self.timeline.now
            self._awaited.pop(adapter.name, None)
            rows.append(version.row)
        seen = {adapter.version for adapter, _ in rows}
        rows += [self._known[n] for n in sorted(wanted - seen) if n in self._known]
        for number in list(self._known)[:-KEPT_COMMITS]:
            del self._known[number]
        return rows

    def _reconcile(self, listed: list[Listed]) -> Process:
        while True:
            decisions = self.plans.of(
                listed,
                self._staged,
                self.loaded,
                set(self.in_use) | self._asked,
                self.shelf.live,
                self._high_water,
                self._unloaded,
                self._given,
            )
            removals = [d for d in decisions if isinstance(d, decide.RemoveStaged)]
            todo = [d for d in decisions if d not in removals]
            for decision in todo:
                yield from self._perform(decision)
            if not todo or self._has_news:
                self._staged.difference_update(one.digest for one in removals)
                return

    # --- acting -------------------------------------------------------------------------------

    def _perform(self, decision: decide.Decision) -> Process:
        match decision:
            case decide.Stage(adapter=adapter):
                yield from self._stage(adapter)
            case decide.Load(adapter=adapter):
                yield from self._load(adapter)
            case decide.Unload(name=name) if name not in self.in_use:
                yield UNLOAD_S
                self._unloaded_now.add(name)
                self._hold([one for one in self.loaded if one != name])

    def _stage(self, adapter: AdapterId) -> Process:
        size_bytes = self.inputs.adapter_bytes
        yield from self.mount.read_adapter(adapter.version, size_bytes)
        hashed_s = size_bytes / (self.inputs.hash_mb_per_s * MB)
        yield hashed_s
        self._staged.add(adapter.digest)
        at = self._phases.setdefault(adapter.name, Phases(announced=self.timeline.now))
        at.staged, at.hashed_s = self.timeline.now, hashed_s

    def _load(self, adapter: AdapterId) -> Process:
        engine = self.inputs.engine
        self._given.add(adapter.digest)
        yield self.slowness * (engine.load_s + self.inputs.adapter_mb / engine.load_mb_per_s)
        self.skipped += max(0, adapter.version - self._high_water - 1) if self._high_water else 0
        self._high_water = max(self._high_water, adapter.version)
        self._asked.discard(adapter.name)
        self._unloaded |= self._unloaded_now
        self._unloaded_now.clear()
        self._hold([*self.loaded, adapter.name])
        at = self._phases.setdefault(adapter.name, Phases(announced=self.timeline.now))
        at.loaded = self.timeline.now
        self.timeline.at(
            self.timeline.now + self.inputs.rtt_s / 2, lambda: self.acked(self, adapter, at)
        )

    def _hold(self, loaded: list[str]) -> None:
        """vLLM lists these; the proxy hears of it."""
        self.loaded = loaded
        self._unloaded.difference_update(loaded)
        self.replica.loaded = frozenset(loaded)
