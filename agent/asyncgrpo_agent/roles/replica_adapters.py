"""The replica's adapters: look at the bucket, compare with what vLLM holds, load or drop.

Level-triggered: a hint from the proxy, a change in the bucket, a timer, a restarted vLLM and a late
start all lead to the same round. One round runs at a time. What vLLM lists is the truth about what
is loaded; the listing of the bucket is the truth about what exists. An ack is sent only for bytes
that were verified while they were staged, were loaded with 200, and that vLLM lists with the staged
path.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core import adapters as decide
from asyncgrpo_agent.core import looks
from asyncgrpo_agent.core.adapters import AdapterId, Listed
from asyncgrpo_agent.core.arrivals import RETRY_S, Arrivals
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.replica_metrics import LoadCounts
from asyncgrpo_agent.errors import (
    AdapterDamagedError,
    AdapterPrunedError,
    AdapterRefusedError,
    EngineError,
    StoreError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.replica_commits import Commits
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store import staging
from asyncgrpo_agent.store.high_water import HighWater
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

ALREADY_LOADED: Final = 400


@dataclass
class Loader:
    """Brings what the run wants into one vLLM."""

    config: Config
    join: Join
    engine: EngineHost
    tell: Callable[[m.FromDialler], Awaitable[None]]
    attempt: str = ""
    live: list[str] = field(default_factory=list)
    linked: bool = False  # the proxy announces what is new
    loaded: list[str] = field(default_factory=list)
    in_use: Counter[str] = field(default_factory=Counter)
    counts: LoadCounts = field(default_factory=LoadCounts)
    in_round: trio.Lock = field(default_factory=trio.Lock)  # held while it works by a listing
    _wake: trio.Event = field(default_factory=trio.Event)
    _arrivals: Arrivals = field(default_factory=Arrivals)
    _asked: set[str] = field(default_factory=set)  # names that a rollout waits for in the proxy
    _on_disk: set[str] = field(default_factory=set)  # digests, from an earlier start too
    _staged: dict[str, staging.StagedAdapter] = field(default_factory=dict)  # verified by this one
    _unloaded: set[str] = field(default_factory=set)  # before the last load
    _unloaded_now: set[str] = field(default_factory=set)  # since
    _given: set[str] = field(default_factory=set)  # digests that this vLLM was ever given
    _is_watched: bool = False  # the bucket's changes are told
    _trouble: str = ""  # why the last round failed

    def __post_init__(self) -> None:
        self.staging_folder = self.config.state_dir / "staged" / self.join.run
        path, agent = self.config.bucket.path, self.config.agent
        self.bucket = BucketHost(path, self.join.run, agent, changed=self.wake)
        self.commits = Commits(self.join, self._base_model_digest, self._arrivals)
        self.high_water = HighWater(self.config.state_dir / f"high-water-{self.join.run}.json")

    def _base_model_digest(self) -> str:
        """A quantised checkpoint has weights of its own; the proxy decides whether it may serve."""
        facts = self.engine.facts
        return "" if facts is not None and facts.quantization else self.engine.model_digest

    # --- what others tell -----------------------------------------------------------------

    def accept(self, attempt: str, live: list[str]) -> None:
        """The proxy took this replica; `attempt` is empty while no trainer has come."""
        self.linked = True
        if attempt:
            is_new = self._enter(attempt)
            if live or is_new:  # a proxy that has just restarted knows of none yet
                self.live = live
        self.wake()

    def unlinked(self) -> None:
        """The link has ended: from now on the bucket alone tells."""
        self.linked = False
        self.wake()

    def announced(self, message: m.Announce) -> None:
        if self._is_superseded(message.adapter.attempt):
            log.warning("attempt.superseded", announced=message.adapter.attempt, now=self.attempt)
            return
        self._enter(message.adapter.attempt)
        self.live = message.live
        self._asked &= set(message.live)
        if message.adapter.name not in self.loaded:
            self._asked.add(message.adapter.name)
            now = trio.current_time()
            self._arrivals.notice(message.adapter.name, now)
            self.commits.expect(message.commit, now)
        self.wake()

    def retired(self, live: list[str]) -> None:
        self.live = live
        self._asked &= set(live)
        self.wake()

    def engine_changed(self) -> None:
        if self.engine.facts is None:
            self.loaded = []
            self._given = set()
            self._arrivals.try_again()
        self.wake()

    def released(self, name: str) -> None:
        """A rollout that used `name` has ended."""
        self.in_use[name] -= 1
        if not self.in_use[name]:
            del self.in_use[name]
            is_crowded = len(self.loaded) >= self.config.engine.max_loras
            if name not in self.live or is_crowded:
                self.wake()

    def wake(self) -> None:
        self._wake.set()

    def _is_superseded(self, attempt: str) -> bool:
        """A trainer of an older attempt may still write and announce; nothing loads it."""
        if not self.attempt:
            return False
        return decide.parse_attempt(attempt).number < decide.parse_attempt(self.attempt).number

    def _enter(self, attempt: str) -> bool:
        """Whether this is another attempt than before."""
        if attempt == self.attempt:
            return False
        log.info("attempt.entered", attempt=attempt, before=self.attempt or "none")
        if decide.parse_attempt(attempt).number < self.high_water.value[0]:
            log.error(
                "attempt.too_old",
                attempt=attempt,
                loaded_before=self.high_water.value[0],
                fix="This host has served a later attempt; was the proxy's state lost?",
            )
        self.attempt = attempt
        self._asked.clear()
        self.commits.forget()
        self._arrivals.try_again()
        return True

    # --- rounds ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds for ever, one after a wake-up or a timer."""
        async with self.bucket.running():
            await self._rounds()

    async def _rounds(self) -> None:
        self._on_disk = await trio.to_thread.run_sync(staging.clean, self.staging_folder)
        while True:
            with trio.move_on_after(self._pause_s()):
                await self._wake.wait()
            self._wake = trio.Event()
            if self.engine.facts is None or not self.attempt:
                continue
            try:
                async with self.in_round:
                    await self._round()
                self._went("")
            except (StoreError, EngineError, OSError) as error:
                self.counts.failed("OSError" if isinstance(error, OSError) else error)
                self._went(str(error))
                await trio.sleep(RETRY_S)
                self.wake()

    def _went(self, trouble: str) -> None:
        """Tell how a round went where that is news: a bucket may be away for days."""
        hung = self.bucket.hung()
        if trouble or self._trouble:
            notifier.status(f"adapters: {hung or trouble or 'all is well again'}")
        if trouble and trouble != self._trouble:
            held = {"hung": hung} if hung else {}
            log.warning("adapters.round_failed", reason=trouble, **held)
        elif self._trouble and not trouble:
            log.info("adapters.round_succeeded", before=self._trouble)
        self._trouble = trouble

    @property
    def staged(self) -> int:
        """Adapters on disk."""
        return len(self._on_disk)

    def standing(self) -> dict[str, str]:
        """How far those have come that were asked for and are not loaded."""
        now = trio.current_time()
        trouble = f"; {self._trouble}" if self._trouble else ""
        found = {name: self._arrivals.standing(name, now) for name in self._asked}
        return {name: words + trouble for name, words in found.items() if words}

    def _pause_s(self) -> float:
        now = trio.current_time()
        return looks.pause_s(
            watched=self._is_watched,
            linked=self.linked,
            retries_s=self._arrivals.due_s(now),
            awaited_s=self.commits.awaited_s(now),
        )

    async def _round(self) -> None:
        """Look at the bucket, then act. Without the bucket, act by what it has shown before."""
        trouble: StoreError | None = None
        try:
            self._is_watched = await self.bucket.watch(self.attempt)
            mark = self.high_water.value
            listed = await self.commits.look(self.bucket, self.attempt, self.live, mark)
        except StoreError as error:
            trouble = error
            listed = self.commits.remembered()
        await self._reconcile(listed)
        self._forget()
        if trouble is not None:
            raise trouble

    async def _reconcile(self, listed: list[Listed]) -> None:
        """Until nothing is left to do or there is news."""
        while True:
            await self._look_at_engine()
            decisions = decide.plan_reconcile(
                run=self.join.run,
                attempt=self.attempt,
                listed=self._due(listed),
                staged=self._on_disk,
                loaded=self.loaded,
                in_use=set(self.in_use) | self._asked,
                live=self.live,
                high_water=self.high_water.value,
                max_held=self.config.engine.max_loras,
                retired_before=self._unloaded,
                ever_loaded=self._given,
            )
            removals = [d for d in decisions if isinstance(d, decide.RemoveStaged)]
            todo = [d for d in decisions if d not in removals]
            for decision in todo:
                await self._perform(decision)
            if not todo or self._wake.is_set():
                for decision in removals:  # also where news never end
                    await self._perform(decision)
                return

    def _forget(self) -> None:
        """A run may have any number of adapters: keep nothing of those that are gone."""
        known = {adapter.name for adapter, _ in self.commits.remembered()}
        known |= {*self.live, *self.loaded, *self._asked}
        self._arrivals.keep(known)
        self._given &= self._on_disk

    async def _look_at_engine(self) -> None:
        """What vLLM itself lists; the proxy is told whenever that differs from before."""
        models = await self.engine.client.models()
        loaded = [row.id for row in models if row.parent is not None]
        if loaded != self.loaded:
            self._unloaded_now |= set(self.loaded) - set(loaded)  # also what it lost by itself
            for unloaded in (self._unloaded, self._unloaded_now):
                unloaded.difference_update(loaded)
            self.loaded = loaded
            await self.tell(m.Holdings(loaded))

    # --- acting ---------------------------------------------------------------------------

    def _due(self, listed: list[Listed]) -> list[Listed]:
        now = trio.current_time()
        return [(a, key) for a, key in listed if self._arrivals.is_due(a.name, key, now)]

    async def _put_off(self, adapter: AdapterId, reason: str) -> None:
        """Try this adapter again later; others go on. The proxy hears each reason once."""
        if self._arrivals.put_off(adapter.name, reason, trio.current_time()):
            log.warning("adapter.put_off", adapter=adapter.name, reason=reason)
            await self._ack(adapter, ok=False, reason=reason, phases_s={})

    async def _perform(self, decision: decide.Decision) -> None:
        log.debug("adapters.step", step=type(decision).__name__, reason=decision.reason)
        match decision:
            case decide.Stage(adapter=adapter, key=key):
                await self._stage(adapter, key)
            case decide.Load(adapter=adapter):
                await self._load(adapter)
            case decide.Unload(name=name):
                await self._unload(name)
            case decide.RemoveStaged(digest=digest):
                await trio.to_thread.run_sync(staging.remove, self.staging_folder, digest)
                self._staged.pop(digest, None)
                self._on_disk.discard(digest)
                gone = [n for n in self._unloaded if n.endswith(digest[:12])]
                self._unloaded.difference_update(gone)

    async def _stage(self, adapter: AdapterId, key: str) -> None:
        commit = self.commits.known.get(key)
        if commit is None:  # another attempt was entered meanwhile
            return
        try:
            staged = await self.bucket.stage(
                commit, self.staging_folder, max_rank=self.config.engine.max_lora_rank
            )
        except AdapterPrunedError as error:
            log.info("adapter.pruned", adapter=adapter.name)
            self._arrivals.refused[key] = str(error)
            self._asked.discard(adapter.name)
            return
        except StoreError as error:
            self.counts.failed(error)
            if self._may_heal(adapter, error):
                await self._put_off(adapter, str(error))
            else:
                self.commits.refuse(key, str(error))
                await self._ack(adapter, ok=False, reason=str(error), phases_s={})
            return
        self._staged[adapter.digest] = staged
        self.counts.staged_bytes += staged.total_bytes
        self._on_disk.add(adapter.digest)
        self._arrivals.reach("staged", adapter.name, trio.current_time())

    def _may_heal(self, adapter: AdapterId, error: StoreError) -> bool:
        """Some mounts show a file before all of it is there; bytes that stay wrong are corrupt."""
        if isinstance(error, AdapterDamagedError):
            return self._arrivals.is_hopeful(adapter.name)
        return not isinstance(error, AdapterRefusedError)

    async def _load(self, adapter: AdapterId) -> None:
        if adapter.digest not in self._staged:  # left by an earlier start: verify it again
            self._on_disk.discard(adapter.digest)
            return
        staged, began = self._staged[adapter.digest], trio.current_time()
        self._given.add(adapter.digest)
        self._unloaded_now.add(adapter.name)  # until vLLM lists it: its files go as any others do
        said = ""
        try:
            await self.engine.client.load_adapter(adapter.name, str(staged.path))
        except EngineError as error:
            if error.status != ALREADY_LOADED:
                self.counts.failed(error)
                await self._put_off(adapter, str(error))
                return
            said = str(error)
        now = trio.current_time()
        roots = {row.id: row.root for row in await self.engine.client.models()}
        if roots.get(adapter.name) != str(staged.path):
            self.counts.failed("NotListed")
            listed = f"vLLM lists {roots.get(adapter.name)!r} for it, not the staged folder"
            await self._put_off(adapter, f"{said}; {listed}" if said else listed)
            return
        if self.config.replica.warm_up:
            await self._warm_up(adapter.name)
        self._asked.discard(adapter.name)
        self._unloaded |= self._unloaded_now
        self._unloaded_now.clear()
        self._unloaded.discard(adapter.name)
        await self._raise_mark(adapter)
        noticed, since_s = self._arrivals.arrive(adapter.name, began)
        phases_s = {**staged.phases_s, **since_s}
        phases_s |= {"loaded": now - began, "total": now - noticed}
        await self._look_at_engine()
        if adapter.name not in self.loaded:  # vLLM has been restarted meanwhile
            return
        self.counts.load_s.observe(phases_s["total"])
        phases_s["acked"] = trio.current_time() - noticed
        await self._ack(adapter, ok=True, reason="", phases_s=phases_s)

    async def _warm_up(self, name: str) -> None:
        try:
            await self.engine.client.probe(name)
        except EngineError as error:
            log.warning("adapter.cold", adapter=name, reason=str(error))

    async def _raise_mark(self, adapter: AdapterId) -> None:
        number = decide.parse_attempt(adapter.attempt).number
        try:
            await trio.to_thread.run_sync(self.high_water.raise_to, number, adapter.version)
        except OSError as error:  # it holds for as long as this process lives
            log.error("high_water.unwritten", adapter=adapter.name, error=error.strerror)

    async def _unload(self, name: str) -> None:
        if name in self.in_use:  # a rollout came for it meanwhile
            return
        try:
            await self.engine.client.unload_adapter(name)
        except EngineError as error:
            if error.status != 404:  # vLLM has forgotten it by itself
                raise
        self._unloaded_now.add(name)
        log.info("adapter.unloaded", adapter=name)

    async def _ack(
        self, adapter: AdapterId, *, ok: bool, reason: str, phases_s: dict[str, float]
    ) -> None:
        if ok:
            log.info("adapter.loaded", adapter=adapter.name, **phases_s)
        ident = m.Adapter(adapter.name, adapter.attempt, adapter.version, adapter.digest)
        await self.tell(m.Ack(ident, ok, reason, phases_s))
