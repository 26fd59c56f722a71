"""The replica's adapters: look at the bucket, compare with what vLLM holds, load or drop.

Level-triggered: a hint from the proxy, a change in the bucket, a timer, a restarted vLLM and a late
start all lead to the same round. One round runs at a time. What vLLM lists is the truth about what
is loaded; the listing of the bucket is the truth about what exists. An ack is sent only for bytes
that were verified while they were staged, were loaded with 200, and that vLLM lists with the staged
path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core import adapters as decide
from asyncgrpo_agent.core.adapters import AdapterId, Listed
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import (
    AdapterRefusedError,
    BucketUnavailableError,
    EngineError,
    StoreError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.store import bucket, staging
from asyncgrpo_agent.store.high_water import HighWater
from asyncgrpo_agent.store.mounts import MountWatch
from asyncgrpo_agent.store.watch import watch_commits
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

ROUND_EVERY_S: Final = 5.0  # a missed event costs at most this
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
ALREADY_LOADED: Final = 400
POLL_S: Final = 1.0  # on mounts, where a change of another host raises no event
KEPT_COMMITS: Final = 64


@dataclass
class Retry:
    """An adapter that could not be brought in: when to try again, and what was said of it."""

    at: float
    delay_s: float
    reason: str


@dataclass
class Loader:
    """Brings what the run wants into one vLLM."""

    config: Config
    join: Join
    engine: EngineHost
    tell: Callable[[m.FromDialler], Awaitable[None]]
    attempt: str = ""
    live: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    in_use: Counter[str] = field(default_factory=Counter)
    _wake: trio.Event = field(default_factory=trio.Event)
    _commits: dict[str, Commit] = field(default_factory=dict)  # by key
    _refused: dict[str, str] = field(default_factory=dict)  # key -> why it is never tried again
    _asked: set[str] = field(default_factory=set)  # names that a rollout waits for in the proxy
    _on_disk: set[str] = field(default_factory=set)  # digests, from an earlier start too
    _staged: dict[str, staging.StagedAdapter] = field(default_factory=dict)  # verified by this one
    _unloaded: set[str] = field(default_factory=set)  # before the last load
    _unloaded_now: set[str] = field(default_factory=set)  # since
    _given: set[str] = field(default_factory=set)  # digests that this vLLM was ever given
    _retries: dict[str, Retry] = field(default_factory=dict)  # by physical name
    _noticed_at: dict[str, float] = field(default_factory=dict)  # by physical name

    def __post_init__(self) -> None:
        self.run_folder = Path(self.config.bucket.path) / self.join.run
        self.staging_folder = self.config.state_dir / "staged" / self.join.run
        self.mount = MountWatch(self.run_folder.parent)
        self.listing = bucket.Listing(self.run_folder)
        self.high_water = HighWater(self.config.state_dir / f"high-water-{self.join.run}.json")

    # --- what others tell -----------------------------------------------------------------

    def accept(self, attempt: str, live: list[str]) -> None:
        """The proxy took this replica; `attempt` is empty while no trainer has come."""
        if attempt:
            is_new = self._enter(attempt)
            if live or is_new:  # a proxy that has just restarted knows of none yet
                self.live = live
        self.wake()

    def announced(self, message: m.Announce) -> None:
        if self._is_superseded(message.adapter.attempt):
            log.warning("attempt.superseded", announced=message.adapter.attempt, now=self.attempt)
            return
        self._enter(message.adapter.attempt)
        self.live = message.live
        if message.adapter.name not in self.loaded:
            self._asked.add(message.adapter.name)
            self._noticed_at.setdefault(message.adapter.name, trio.current_time())
        self.wake()

    def retired(self, live: list[str]) -> None:
        self.live = live
        self._asked &= set(live)
        self.wake()

    def engine_changed(self) -> None:
        if self.engine.facts is None:
            self.loaded = []
            self._given = set()
        self.wake()

    def released(self, name: str) -> None:
        """A rollout that used `name` has ended."""
        self.in_use[name] -= 1
        if not self.in_use[name]:
            del self.in_use[name]
            if name not in self.live:
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
        self._commits.clear()
        self._retries.clear()
        return True

    # --- rounds ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Rounds for ever, one after a wake-up or a timer."""
        self._on_disk = await trio.to_thread.run_sync(staging.clean, self.staging_folder)
        while True:
            with trio.move_on_after(self._pause_s()):
                await self._wake.wait()
            self._wake = trio.Event()
            if self.engine.facts is None or not self.attempt:
                continue
            try:
                await self._round()
            except (StoreError, EngineError, OSError) as error:
                log.warning("adapters.round_failed", reason=str(error))
                await trio.sleep(RETRY_S)
                self.wake()

    def _pause_s(self) -> float:
        now = trio.current_time()
        due_s = [retry.at - now for retry in self._retries.values() if retry.at > now]
        return min([ROUND_EVERY_S, *due_s])

    async def watch(self) -> None:
        """For ever: a change in the bucket wakes the rounds."""

        def folders() -> list[Path]:
            return bucket.commit_folders(self.run_folder, self.attempt or None)

        await watch_commits(folders, remote=self.mount.remote, poll_s=POLL_S, changed=self.wake)

    async def _round(self) -> None:
        """Compare and act until nothing is left to do."""
        while True:
            await self._look_at_engine()
            listed = await self._list()
            decisions = decide.plan_reconcile(
                run=self.join.run,
                attempt=self.attempt,
                listed=[row for row in listed if not self._waits(row[0].name)],
                staged=self._on_disk,
                loaded=self.loaded,
                in_use=set(self.in_use) | self._asked,
                live=self.live,
                high_water=self.high_water.value,
                max_held=self.config.engine.max_loras,
                retired_before=self._unloaded,
                ever_loaded=self._given,
            )
            todo = [d for d in decisions if not isinstance(d, decide.RemoveStaged)]
            for decision in todo or decisions:
                await self._perform(decision)
            if not todo:
                return

    async def _look_at_engine(self) -> None:
        """What vLLM itself lists; the proxy is told whenever that differs from before."""
        models = await self.engine.client.models()
        loaded = [row.id for row in models if row.parent is not None]
        if loaded != self.loaded:
            self.loaded = loaded
            await self.tell(m.Holdings(loaded))

    async def _list(self) -> list[Listed]:
        """The commits of this attempt that matter: the newest, and the live ones."""
        self.mount.check()  # an unmounted bucket looks like an empty folder
        wanted = {p.version for name in self.live if (p := decide.parse_name(name)) is not None}
        mark = self.high_water.value
        same = decide.parse_attempt(self.attempt).number == mark[0]
        after = min(wanted, default=mark[1] if same else 0) - 1
        keys = await trio.to_thread.run_sync(
            partial(
                bucket.list_commits,
                self.run_folder,
                self.attempt,
                after_version=after,
                listing=self.listing,
            ),
            abandon_on_cancel=True,
        )
        rows: list[Listed] = []
        for key in keys:  # newest first; one that cannot be read does not hide the next
            parts = decide.parse_commit_key(key)
            if not rows or (parts is not None and parts.version in wanted):
                commit = await self._commit(key)
                if commit is not None:
                    rows.append((commit.adapter, key))
        return rows

    async def _commit(self, key: str) -> Commit | None:
        if key in self._refused:
            return None
        if key not in self._commits:
            try:
                listed = await trio.to_thread.run_sync(
                    partial(
                        bucket.read_commit,
                        self.run_folder,
                        key,
                        run=self.join.run,
                        public_key=self.join.run_public_key,
                    ),
                    abandon_on_cancel=True,
                )
                commit = listed.commit
                self._check_base_model(commit, key)
            except AdapterRefusedError as error:
                self._refuse(key, str(error))
                return None
            except BucketUnavailableError as error:  # it may still be on its way
                log.info("commit.unreadable", key=key, reason=str(error))
                return None
            self._noticed_at.setdefault(commit.adapter.name, trio.current_time())
            self._commits[key] = commit
            for old in list(self._commits)[:-KEPT_COMMITS]:
                del self._commits[old]
        return self._commits[key]

    def _check_base_model(self, commit: Commit, key: str) -> None:
        if commit.base_model_digest != self.engine.model_digest:
            raise AdapterRefusedError(
                "was trained on another base model than this replica serves",
                where=key,
                fix="Give model.path the same model on the trainer and on every replica",
            )

    def _refuse(self, key: str, reason: str) -> None:
        log.error("adapter.refused", key=key, reason=reason)
        self._refused[key] = reason

    # --- acting ---------------------------------------------------------------------------

    def _waits(self, name: str) -> bool:
        retry = self._retries.get(name)
        return retry is not None and trio.current_time() < retry.at

    async def _put_off(self, adapter: AdapterId, reason: str) -> None:
        """Try this adapter again later; others go on. The proxy hears each reason once."""
        known = self._retries.get(adapter.name)
        delay_s = min(2 * known.delay_s, MAX_RETRY_S) if known else RETRY_S
        self._retries[adapter.name] = Retry(trio.current_time() + delay_s, delay_s, reason)
        if known is None or known.reason != reason:
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
        commit = self._commits.get(key)
        if commit is None:  # another attempt was entered meanwhile
            return
        try:
            staged = await trio.to_thread.run_sync(
                partial(
                    staging.stage,
                    self.run_folder,
                    commit,
                    self.staging_folder,
                    max_rank=self.config.engine.max_lora_rank,
                    listing=self.listing,
                ),
                abandon_on_cancel=True,
            )
        except AdapterRefusedError as error:
            self._refuse(key, str(error))
            await self._ack(adapter, ok=False, reason=str(error), phases_s={})
            return
        except StoreError as error:
            await self._put_off(adapter, str(error))
            return
        self._staged[adapter.digest] = staged
        self._on_disk.add(adapter.digest)

    async def _load(self, adapter: AdapterId) -> None:
        if adapter.digest not in self._staged:  # left by an earlier start: verify it again
            self._on_disk.discard(adapter.digest)
            return
        staged, began = self._staged[adapter.digest], trio.current_time()
        self._given.add(adapter.digest)
        said = ""
        try:
            await self.engine.client.load_adapter(adapter.name, str(staged.path))
        except EngineError as error:
            if error.status != ALREADY_LOADED:
                await self._put_off(adapter, str(error))
                return
            said = str(error)
        now = trio.current_time()
        roots = {row.id: row.root for row in await self.engine.client.models()}
        if roots.get(adapter.name) != str(staged.path):
            listed = f"vLLM lists {roots.get(adapter.name)!r} for it, not the staged folder"
            await self._put_off(adapter, f"{said}; {listed}" if said else listed)
            return
        if self.config.replica.warm_up:
            await self.engine.client.probe(adapter.name)
        self._asked.discard(adapter.name)
        self._retries.pop(adapter.name, None)
        self._unloaded |= self._unloaded_now
        self._unloaded_now.clear()
        self._unloaded.discard(adapter.name)
        self.high_water.raise_to(decide.parse_attempt(adapter.attempt).number, adapter.version)
        noticed = self._noticed_at.pop(adapter.name, began)
        phases_s = {**staged.phases_s, "loaded": now - began, "total": now - noticed}
        await self._look_at_engine()
        await self._ack(adapter, ok=True, reason="", phases_s=phases_s)

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
