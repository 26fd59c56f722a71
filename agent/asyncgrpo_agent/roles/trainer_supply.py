"""Adapters for replicas without a bucket, from the trainer's side: sent to the proxy over the link.

A fresh publication is sent from TRL's own folder, whose files are held open, so that neither the
sync waits for a slow line nor TRL's tidying matters. What the proxy asks for later is staged from
the bucket and verified first. One adapter is under way at a time, and a newer one overtakes older
ones that have not begun. Nothing here fails a sync: a replica that got no bytes is merely late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.core import commits
from asyncgrpo_agent.core.adapters import ADAPTER_FILES, AdapterId
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import LinkError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles.adapter_transfer import send_adapter
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store import staging
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.store.outgoing import OpenAdapter

log = Log(__name__)

KEPT_COMMITS: Final = 64
FRESH_S: Final = 5.0  # a request that came this soon after an upload had crossed it


@dataclass(slots=True)
class Supplier:
    """All uploads of this attempt. `max_rank` tells what staging checks against."""

    join: Join
    link: TrainerLink
    bucket: BucketHost
    turns: Turns
    staging_dir: Path
    max_rank: Callable[[], int]
    record: Callable[..., None]
    link_sources: int = 0  # replicas that want any
    _published: dict[str, PublishedAdapter] = field(default_factory=dict)  # by physical name
    _fresh: OpenAdapter | None = None
    _asked: list[str] = field(default_factory=list)  # newest first
    _under_way: str = ""
    _sent_at: dict[str, float] = field(default_factory=dict)
    _wake: trio.Event = field(default_factory=trio.Event)

    def published(self, written: PublishedAdapter, folder: Path) -> None:
        """An adapter was committed; `folder` is where TRL saved it."""
        self._published[written.adapter.name] = written
        for old in list(self._published)[:-KEPT_COMMITS]:
            del self._published[old]
            self._sent_at.pop(old, None)
        if not self.link_sources:
            return
        try:
            fresh = _opened(written, folder)
        except OSError as error:  # the proxy will ask for it
            log.warning("adapter.unsupplied", adapter=written.adapter.name, reason=str(error))
            return
        if self._fresh is not None:
            self._fresh.close()  # superseded before it began
        self._fresh = fresh
        self._wake.set()

    def asked(self, names: list[str]) -> None:
        """The proxy lacks these, newest first."""
        self._asked = [name for name in names if self._is_due(name)]
        self._wake.set()

    def _is_due(self, name: str) -> bool:
        waiting = self._fresh is not None and self._fresh.adapter.name == name
        fresh = trio.current_time() - self._sent_at.get(name, -math.inf) < FRESH_S
        return name in self._published and not (waiting or fresh or name == self._under_way)

    async def run(self) -> None:
        """Send for ever, one after another."""
        await trio.to_thread.run_sync(_emptied, self.staging_dir)
        while True:
            link = await self.link.current()  # first: what waits for it may be superseded
            if self._fresh is not None:
                source, self._fresh = self._fresh, None
                await self._supply(link, source)
            elif self._asked:
                published = self._published.get(self._asked.pop(0))
                if published is not None:  # else many newer ones came while this waited
                    await self._supply_from_bucket(link, published)
            else:
                await self._wake.wait()
                self._wake = trio.Event()

    async def _supply_from_bucket(self, link: Link, published: PublishedAdapter) -> None:
        """Through the mount's worker, as everything that reads the bucket."""
        digest = published.adapter.digest
        commit = commits.decode(
            published.sealed, run=self.join.run, public_key=self.join.run_public_key
        )
        self._under_way = published.adapter.name
        try:
            await self.turns.upkeep()
            staged = await self.bucket.stage(commit, self.staging_dir, max_rank=self.max_rank())
            await self._supply(link, _opened(published, staged.path))
        except (StoreError, OSError) as error:
            self._failed(published.adapter, str(error))
        finally:
            self._under_way = ""
            with trio.CancelScope(shield=True):  # a local disk: this takes a moment
                await self._unstage(digest)

    async def _unstage(self, digest: str) -> None:
        try:
            await trio.to_thread.run_sync(staging.remove, self.staging_dir, digest)
        except OSError as error:  # the next start removes it
            log.warning("adapter.left", path=self.staging_dir / digest, error=error.strerror)

    async def _supply(self, link: Link, source: OpenAdapter) -> None:
        began, self._under_way = trio.current_time(), source.adapter.name
        try:
            answer = await send_adapter(link, source)
        except (LinkError, StoreError) as error:
            self._failed(source.adapter, str(error))
            return
        finally:
            self._under_way = ""
            source.close()
        if answer.outcome == "refused":
            self._failed(source.adapter, answer.reason)
            return
        seconds = trio.current_time() - began
        self._sent_at[source.adapter.name] = trio.current_time()
        self.record("supply", adapter=source.adapter.name, outcome=answer.outcome, seconds=seconds)
        log.info("adapter.supplied", adapter=source.adapter.name, seconds=seconds)

    def _failed(self, adapter: AdapterId, reason: str) -> None:
        """Replicas without a bucket are late; the proxy asks again."""
        self.record("supply", adapter=adapter.name, outcome="failed", reason=reason)
        log.warning("adapter.unsupplied", adapter=adapter.name, reason=reason)


def _opened(published: PublishedAdapter, folder: Path) -> OpenAdapter:
    paths = [folder / name for name in ADAPTER_FILES]
    return OpenAdapter(published.adapter, published.commit_key, published.sealed, paths)


def _emptied(folder: Path) -> None:
    for digest in staging.clean(folder):
        staging.remove(folder, digest)
