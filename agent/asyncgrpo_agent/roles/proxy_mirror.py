"""Adapters for replicas without a bucket: taken from the trainer, kept on disk, pushed on.

    <state>/mirror/<run>/...     laid out as the bucket

What the mirror lacks and such a replica needs, the trainer is asked for; what it holds it serves
while the trainer is away. It keeps the live window and the newest adapter. All is checked against
the run's key before it is kept, so that garbage ends here, but what counts is the replica's own
check: this machine is trusted with no adapter.

Each such replica has a task that pushes to it, one adapter at a time: the newest that the mirror
has, then what a rollout asked for. What was superseded before it began is skipped. Whoever takes an
adapter home (`proxy_adapters`) gets it from here too, and what the mirror lacks is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.errors import AdapterPrunedError, AgentError, LinkError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.adapter_transfer import (
    receive_adapter,
    refuse_adapter,
    refused,
    send_adapter,
)
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, ReplicaLink
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.mirror import Held, Mirror
from asyncgrpo_agent.store.outgoing import OpenAdapter
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

LOOK_S: Final = 1.0
ON_ITS_WAY_S: Final = 0.5  # before the first request for an adapter: it may have just been made
SUPPLY_EVERY_S: Final = 5.0  # between two requests
ASKED_S: Final = 15.0  # for so long after it was asked for, an adapter is wanted
SUPPLY_S: Final = 60.0  # a reader waits for no longer, and while there is no trainer, for
AWAY_S: Final = 10.0  # which is longer than a trainer that redials takes
_NEWER: Final = "Take a newer version"
_LATER: Final = "Try again later, or take a version that it holds"
RETRY_S: Final = 2.0  # twice as long after each failure, up to
MAX_RETRY_S: Final = 120.0


@dataclass(slots=True)
class Delays:
    """When what failed may be tried again, by physical name."""

    _until: dict[str, tuple[float, float]] = field(default_factory=dict)  # at, delay

    def put_off(self, name: str) -> None:
        _, delay_s = self._until.get(name, (0.0, RETRY_S / 2))
        delay_s = min(2 * delay_s, MAX_RETRY_S)
        self._until[name] = (trio.current_time() + delay_s, delay_s)

    def clear(self, name: str) -> None:
        self._until.pop(name, None)

    def keep(self, names: Container[str]) -> None:
        """Forget all others."""
        self._until = {name: until for name, until in self._until.items() if name in names}

    def waits(self, name: str) -> bool:
        return name in self._until and trio.current_time() < self._until[name][0]

    def next_at(self) -> float:
        now = trio.current_time()
        return min((at for at, _ in self._until.values() if at > now), default=math.inf)


@dataclass(slots=True)
class RunMirror:
    """The mirror of one run, opened when somebody needs it."""

    run: ProxyRun
    state_dir: Path
    _store: Mirror | None = None
    _opening: trio.Lock = field(default_factory=trio.Lock)
    _receiving: trio.Lock = field(default_factory=trio.Lock)  # one at a time bounds what waits
    _under_way: str = ""
    _trouble: str = ""
    _uploads: Delays = field(default_factory=Delays)
    _lent: Counter[str] = field(default_factory=Counter)  # readers that want one, by physical name

    async def store(self) -> Mirror:
        """Raises StoreError, and ConfigError if the run's key is not here."""
        async with self._opening:
            if self._store is None:
                self._store = await trio.to_thread.run_sync(self._open)
            return self._store

    async def _usable(self) -> Mirror | None:
        """None, told once, while it cannot be opened."""
        try:
            return await self.store()
        except AgentError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                log.error("mirror.unusable", run=self.run.name, reason=self._trouble)
            return None

    def _open(self) -> Mirror:
        key = identity.run_public_key(self.state_dir, self.run.name)
        return Mirror(self.state_dir / "mirror", self.run.name, key)

    # --- from the trainer -----------------------------------------------------------------

    async def receive(self, stream: LinkStream) -> None:
        """An adapter that the trainer's agent sends."""
        began = trio.current_time()
        async with self._receiving:
            try:
                store = await self.store()
            except AgentError as error:
                adapter, answer = await refuse_adapter(stream, str(error))
            else:
                adapter, answer = await self._take(stream, store)
        if answer.outcome == "refused":
            self._uploads.put_off(adapter.name)
            self._uploads.keep({*self.run.known, adapter.name})
            log.error(
                "mirror.refused", run=self.run.name, adapter=adapter.name, reason=answer.reason
            )
            return
        self._uploads.clear(adapter.name)
        log.info(
            "mirror.received",
            run=self.run.name,
            adapter=adapter.name,
            outcome=answer.outcome,
            seconds=trio.current_time() - began,
        )
        self.run.wanted.ring()
        await self._prune({*self.run.live, *self._lent, adapter.name})

    async def _take(self, stream: LinkStream, store: Mirror) -> tuple[m.Adapter, m.AdapterAnswer]:
        def admit(envelope: m.AdapterBytes) -> m.AdapterAnswer | None:
            if envelope.adapter.attempt != self.run.attempt:
                return refused(f"attempt {self.run.attempt} is the run's now")
            self._under_way = envelope.adapter.name
            return None

        try:
            return await receive_adapter(stream, store, admit)
        finally:
            self._under_way = ""

    async def keep_newest(self) -> None:
        """The run is over, and with it the link that says so."""
        with trio.CancelScope(shield=True):  # a local disk: this takes a moment
            await self._prune({*self._lent})

    async def _prune(self, keep: set[str]) -> None:
        if self._store is None:
            return
        try:
            gone = await trio.to_thread.run_sync(self._store.prune, keep)
        except StoreError as error:
            log.warning("mirror.unpruned", run=self.run.name, reason=str(error))
        else:
            log.debug("mirror.pruned", run=self.run.name, adapters=gone)

    async def ask(self, control: ProxyChannel) -> None:
        """For ever: ask the trainer's agent for what is needed and not here."""
        ask_at: dict[str, float] = {}
        while True:
            now = trio.current_time()
            lacking = await self._lacking()
            ask_at = {name: ask_at.get(name, now + ON_ITS_WAY_S) for name in lacking}
            due = [name for name in lacking if ask_at[name] <= now]
            if due:
                log.info("mirror.lacks", run=self.run.name, adapters=due)
                await control.send(m.Supply(due))
                ask_at |= dict.fromkeys(due, now + SUPPLY_EVERY_S)
            await self.run.wanted.rung(min(ask_at.values(), default=self._next_look()))

    def _next_look(self) -> float:
        """When to look again unasked: uploads that failed, a mirror that could not be opened."""
        usable = self._store is not None or not self.run.link_sources
        return self._uploads.next_at() if usable else trio.current_time() + MAX_RETRY_S

    async def _lacking(self) -> list[str]:
        """What replicas need and nobody has brought yet, newest first."""
        wanted = [*self.run.live[-1:], *self._asked()] if self.run.link_sources else []
        wanted += self._lent
        if not wanted:
            return []
        store = await self._usable()
        if store is None:
            return []
        lacking = [n for n in dict.fromkeys(wanted) if n not in store and n != self._under_way]
        return [name for name in lacking if not self._uploads.waits(name)]

    def _asked(self) -> list[str]:
        """Names that rollouts wait for, the last one first."""
        now = trio.current_time()
        asked = [(at, name) for name, at in self.run.asked_at.items() if now - at < ASKED_S]
        return [name for _, name in sorted(asked, reverse=True)]

    # --- to a reader ----------------------------------------------------------------------

    async def shelf(self) -> m.AdapterList:
        """What a reader can have: what is held, and what the trainer can bring."""
        store = await self._usable()
        shelf = [] if store is None else await trio.to_thread.run_sync(store.shelf)
        rows = {held.adapter.name: self._listed(held, sealed) for held, sealed in shelf}
        for name in self.run.live:
            if name not in rows and (announce := self.run.known.get(name)):
                rows[name] = self._row(announce.adapter, announce.commit, b"")
        return m.AdapterList(self.run.name, self.run.live, list(rows.values()))

    def _listed(self, held: Held, sealed: bytes) -> m.ListedAdapter:
        ident = held.adapter
        adapter = m.Adapter(ident.name, ident.attempt, ident.version, ident.digest)
        return self._row(adapter, held.key, sealed)

    def _row(self, adapter: m.Adapter, key: str, sealed: bytes) -> m.ListedAdapter:
        replicas = [link.replica for link in self.run.links.values()]
        holders = sorted(replica.name for replica in replicas if adapter.name in replica.loaded)
        return m.ListedAdapter(adapter, key, sealed, holders)

    async def lend(self, name: str) -> OpenAdapter:
        """Open what is held, or what the trainer brings in time. Raises StoreError, ConfigError."""
        store = await self.store()
        with self._wanted_by_a_reader(name):
            await self._brought(name, store)
            try:
                return await trio.to_thread.run_sync(store.open, name)
            except StoreError:
                await self._recheck(name)
                raise

    @contextmanager
    def _wanted_by_a_reader(self, name: str) -> Iterator[None]:
        self._lent[name] += 1
        self.run.wanted.ring()
        try:
            yield
        finally:
            self._lent[name] -= 1
            self._lent = +self._lent

    async def _brought(self, name: str, store: Mirror) -> None:
        began = seen = trio.current_time()
        while name not in store:
            now = trio.current_time()
            seen = seen if self.run.trainer is None else now
            if name not in self.run.live and name != self._under_way:
                raise AdapterPrunedError("is not in use any more", where=name, fix=_NEWER)
            if now - seen >= AWAY_S:
                raise _unsupplied(name, "the trainer, who could bring it, is not connected")
            if now - began >= SUPPLY_S:
                is_coming = self._under_way == name
                why = "is still bringing it" if is_coming else "has not brought it"
                raise _unsupplied(name, f"the trainer {why} after {SUPPLY_S:g} s")
            await self.run.wanted.rung(now + LOOK_S)

    # --- to a replica ---------------------------------------------------------------------

    @asynccontextmanager
    async def pushed_to(self, here: ReplicaLink) -> AsyncIterator[None]:
        """While the block lasts, the replica is given what it needs, if it has no bucket."""
        if here.source != "link":
            yield
            return
        self.run.wanted.ring()
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._push, here)
            try:
                yield
            except BaseException as error:  # raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _push(self, here: ReplicaLink) -> None:
        """Until the link ends, which its own task tells."""
        begun_at: dict[str, float] = {}
        delays = Delays()
        while not here.link.closed:
            name = await self._next(here, begun_at, delays)
            if name is None:
                await self.run.wanted.rung(min(delays.next_at(), self._next_look()))
                continue
            begun_at = {n: at for n, at in begun_at.items() if n in self.run.known}
            begun_at[name] = trio.current_time()
            if await self._send(here, name):
                delays.clear(name)
            else:
                delays.put_off(name)
                del begun_at[name]
            delays.keep(self.run.known)

    async def _next(
        self, here: ReplicaLink, begun_at: dict[str, float], delays: Delays
    ) -> str | None:
        """What to push now: the newest, then what was asked for since it was pushed last."""
        store = await self._usable()
        if store is None:
            return None
        held = [name for name in reversed(self.run.live) if name in store]
        asked_at = self.run.asked_at
        wanted = [name for name in held[:1] if name not in begun_at]
        wanted += [n for n in self._asked() if n in held and asked_at[n] > begun_at.get(n, -1.0)]
        for name in wanted:
            if name not in here.replica.loaded and not delays.waits(name):
                return name
        return None

    async def _send(self, here: ReplicaLink, name: str) -> bool:
        """Whether the replica has it now."""
        fields = {"run": self.run.name, "replica": here.replica.name, "adapter": name}
        began = trio.current_time()
        try:
            answer = await self._exchange(here, name)
        except (LinkError, StoreError) as error:
            answer = refused(str(error))
        if answer.outcome != "refused":
            seconds = trio.current_time() - began
            log.info("adapter.pushed", **fields, outcome=answer.outcome, seconds=seconds)
            return True
        if not here.link.closed:
            log.warning("adapter.unpushed", **fields, reason=answer.reason)
            await self._recheck(name)
        return False

    async def _exchange(self, here: ReplicaLink, name: str) -> m.AdapterAnswer:
        assert isinstance(here.link, Link), "only agents of our own get adapters over their links"
        store = await self.store()
        source = await trio.to_thread.run_sync(store.open, name)
        try:
            return await send_adapter(here.link, source)
        finally:
            source.close()

    async def _recheck(self, name: str) -> None:
        """What a replica refused may have rotted here: then the trainer is asked for it again."""
        store = await self.store()
        if not await trio.to_thread.run_sync(store.recheck, name):
            self.run.wanted.ring()


def _unsupplied(name: str, why: str) -> StoreError:
    return StoreError(f"the proxy does not hold it, and {why}", where=name, fix=_LATER)


@dataclass(slots=True)
class Mirrors:
    """The mirrors of all runs of a proxy."""

    state_dir: Path
    _of_runs: dict[str, RunMirror] = field(default_factory=dict)

    def of(self, run: ProxyRun) -> RunMirror:
        return self._of_runs.setdefault(run.name, RunMirror(run, self.state_dir))
