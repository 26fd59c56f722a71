"""The whole of a simulated run: trainer, proxy, replicas that come and go, and their bucket.

When a sync has ended is decided by the real `Sync`, who gets a rollout by the real router, what a
replica loads by the real reconcile plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Final

from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.adapters import AdapterId
from asyncgrpo_agent.core.replicas import Fleet, State
from asyncgrpo_agent.core.segments import EVERY_S
from asyncgrpo_agent.core.sync import Sync
from asyncgrpo_agent.plan.inputs import MB, Inputs
from asyncgrpo_agent.plan.mount import ATTEMPT, S3, Mount, Requests
from asyncgrpo_agent.plan.replicas import HOST_SPREAD, RUN, Loader, Phases, Plans, Shelf, Version
from asyncgrpo_agent.plan.rollouts import Rollouts
from asyncgrpo_agent.plan.timeline import Process, Signal, Timeline, Until

SEGMENT_BYTES: Final = 20_000  # of history in a minute
WARM_SYNCS: Final = 2  # before the measuring begins


@dataclass(slots=True, kw_only=True)
class Published:
    """One sync: TRL's load call, and what came of it. Seconds since it began."""

    began: float
    written_s: float  # the commit is in the bucket
    sync: Sync
    called_s: float = 0.0  # TRL's load call has returned
    timed_out: bool = False
    phases: list[Phases] = field(default_factory=list)  # of each that acked

    @property
    def all_s(self) -> float | None:
        """When the last of those that were asked had it; None while one has not, or if none was."""
        if self.sync.missing or not self.sync.acked:
            return None
        return self.sync.started - self.began + max(self.sync.acked.values())


class Site:
    """`run` to the end, then read it."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.timeline = Timeline()
        self.rng = Random(inputs.seed)  # noqa: S311 - a simulation that can be repeated
        self.s3 = S3(inputs.bucket, self.timeline, self.rng)
        self.shelf, self.plans = Shelf(), Plans(inputs.max_loras)
        self.loaders: dict[str, Loader] = {}
        self.published: list[Published] = []
        lengths = Random(inputs.seed + 1)  # noqa: S311 - the same
        self.rollouts = Rollouts(inputs, self.timeline, lengths, self._released, self._wanted)
        self.lost = 0  # replicas
        self.measured_from_s = 0.0
        self.trainer = Mount(self.s3, inputs.bucket.host_mb_per_s)
        self._others = Fleet()  # replicas that sync, and whose rollouts are not simulated
        self._by_name: dict[str, Published] = {}
        self._changed = Signal()
        self._retiring: list[str] = []
        self._registrations = 0

    def run(self) -> None:
        for index in range(self.inputs.replicas):
            self.timeline.start(self._place(index))
        self.timeline.start(self._train())
        self.timeline.start(self._record())
        self.timeline.run(self.inputs.horizon_s + WARM_SYNCS * self.inputs.sync_every_s)

    @property
    def measured_s(self) -> float:
        return self.timeline.now - self.measured_from_s

    @property
    def measured(self) -> list[Published]:
        """The syncs that have ended, without the first ones."""
        return [one for one in self.published[WARM_SYNCS:] if one.called_s]

    # --- the trainer --------------------------------------------------------------------------

    def _train(self) -> Process:
        inputs, version = self.inputs, 0
        while True:
            version += 1
            began = self.timeline.now
            if version == WARM_SYNCS + 1:
                self._measure()
            adapter = _adapter(version)
            yield 2 * inputs.adapter_bytes / (inputs.hash_mb_per_s * MB)  # before, and as it goes
            yield from self.trainer.publish(version, inputs.adapter_bytes)
            written_s = self.timeline.now - began
            visible_at_s = self.timeline.now + inputs.bucket.visible_after_s
            self.shelf.add(Version(adapter, visible_at_s))
            yield inputs.rtt_s / 2
            one = Published(began=began, written_s=written_s, sync=self._announce(adapter))
            self.published.append(one)
            self._by_name[adapter.name] = one
            while not (verdict := one.sync.verdict(self.timeline.now)).done:
                yield Until(self._changed, one.sync.deadline())
            yield inputs.rtt_s / 2
            one.called_s, one.timed_out = self.timeline.now - began, verdict.timed_out
            self.rollouts.use(adapter.name, version)
            if version > inputs.max_staleness + 1:
                self._retiring.append(_adapter(version - inputs.max_staleness - 1).name)
                self._released()
            yield max(0.0, began + inputs.sync_every_s - self.timeline.now)

    def _announce(self, adapter: AdapterId) -> Sync:
        """As the proxy does."""
        ready = {
            replica.name: replica.capacity
            for fleet in (self.rollouts.fleet, self._others)
            for replica in fleet
            if replica.state is State.READY
        }
        heard_at_s = self.timeline.now + self.inputs.rtt_s / 2
        self.timeline.at(heard_at_s, lambda: self._tell(adapter))
        return Sync(
            adapter=adapter.name,
            started=self.timeline.now,
            quorum=self.inputs.quorum,
            timeout_s=self.inputs.sync_timeout_s,
            capacity=ready,
        )

    def _tell(self, adapter: AdapterId) -> None:
        for loader in list(self.loaders.values()):
            loader.announced(adapter)

    def _released(self) -> None:
        """What TRL has unloaded leaves the live window once no rollout in flight names it."""
        idle = [name for name in self._retiring if name not in self.rollouts.naming]
        if idle:
            self._retiring = [name for name in self._retiring if name not in idle]
            self.shelf.keep([name for name in self.shelf.live if name not in idle])
            for name in idle:
                self.rollouts.retire(name)
            for loader in list(self.loaders.values()):
                loader.retired()

    def _wanted(self, name: str) -> None:
        """A rollout is held for it: the proxy has it announced again."""
        for version in self.shelf.versions:
            if version.adapter.name == name:
                self._tell(version.adapter)

    def _record(self) -> Process:
        """The run's history goes into the bucket, too."""
        number = 0
        while True:
            yield EVERY_S
            number += 1
            yield from self.trainer.write_segment(number, SEGMENT_BYTES)

    def _measure(self) -> None:
        self.measured_from_s = self.timeline.now
        self.s3.asked, self.s3.queued_s, self.lost = Requests(), 0.0, 0
        self.trainer.asked = Requests()
        self.rollouts.measure()

    # --- replicas -----------------------------------------------------------------------------

    def _place(self, index: int) -> Process:
        """One rented machine after the other; the first ones have been there for a while."""
        inputs = self.inputs
        away = inputs.boot_s / (inputs.boot_s + inputs.spot_life_s) if inputs.spot_life_s else 0.0
        boot_s = self.rng.uniform(0, inputs.boot_s) if self.rng.random() < away else 0.0
        while True:
            yield boot_s
            loader = self._join(index)
            process = loader.run()
            self.timeline.start(process)
            if not inputs.spot_life_s:
                return
            yield self.rng.expovariate(1 / inputs.spot_life_s)
            process.close()
            self._leave(loader)
            boot_s = inputs.boot_s

    def _join(self, index: int) -> Loader:
        now, is_placed = self.timeline.now, index < self.inputs.placed
        self._registrations += 1
        name, instance = f"r{index:03}", str(self._registrations)
        fleet = self.rollouts.fleet if is_placed else self._others
        replica = fleet.join(name, instance, self.inputs.engine.slots, now)
        replicas.engine_up(replica, now)
        speed = self.inputs.bucket.host_mb_per_s / self.rng.lognormvariate(0.0, HOST_SPREAD)
        mount = Mount(self.s3, speed)
        loader = Loader(
            *(replica, self.inputs, self.shelf, self.plans, self.timeline, mount),
            *(self.rng, self._acked),
        )
        if is_placed:
            loader.in_use = self.rollouts.joined(replica)
        self.loaders[name] = loader
        return loader

    def _leave(self, loader: Loader) -> None:
        replica, now = loader.replica, self.timeline.now
        self.lost += 1
        del self.loaders[replica.name]
        for fleet in (self.rollouts.fleet, self._others):
            fleet.leave(replica.name, replica.instance, now, "taken away")
        if replica.name in self.rollouts.boxes:
            self.rollouts.lost(replica.name)
        for one in self.published:
            one.sync.gone(replica.name)
        self.timeline.fire(self._changed)

    def _acked(self, loader: Loader, adapter: AdapterId, phases: Phases) -> None:
        """The proxy hears that a replica has loaded an adapter."""
        name = loader.replica.name
        one = self._by_name.get(adapter.name)
        if self.loaders.get(name) is loader and one is not None:
            if name in one.sync.capacity and name not in one.sync.acked:
                one.phases.append(phases)
            one.sync.ack(name, self.timeline.now)
            self.timeline.fire(self._changed)
        if name in self.rollouts.boxes:
            self.rollouts.changed()


def _adapter(version: int) -> AdapterId:
    digest = hashlib.sha256(b"%d" % version).hexdigest()
    return AdapterId(run=RUN, attempt=ATTEMPT, version=version, digest=digest)
