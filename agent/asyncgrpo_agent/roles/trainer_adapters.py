"""TRL's adapters on their way out: publish, announce, wait for the quorum, retire.

TRL's names (`trl-policy-v7`) restart with every resume, physical names never do. This module alone
maps one to the other, and keeps the live window: the names that TRL has loaded and not unloaded.
A name is retired only when no rollout in flight uses it.

Anything but a commit that cannot be written is no error towards TRL, which would die of it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.store import bucket
from asyncgrpo_agent.store.mounts import MountWatch
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)

REPORT_MARGIN_S: Final = 5.0  # beyond the sync's own deadline, for a proxy that went away
KEPT_NAMES: Final = 64

Record = Callable[..., None]  # (kind, **fields)
_VERSION = re.compile(r"-v(\d+)\Z")


@dataclass(slots=True)
class Adapters:
    """All adapters of this attempt."""

    config: Config
    join: Join
    link: TrainerLink
    base_model_digest: str
    record: Record
    known: dict[str, m.Published] = field(default_factory=dict)  # TRL name -> publication
    live: list[str] = field(default_factory=list)  # physical names, newest last
    mount: MountWatch = field(init=False)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _retiring: set[str] = field(default_factory=set)
    _reports: dict[str, trio.Event] = field(default_factory=dict)
    _report: dict[str, m.SyncReport] = field(default_factory=dict)
    _wake: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.mount = MountWatch(Path(self.config.bucket.path))

    def physical_name(self, trl_name: str) -> str | None:
        published = self.known.get(trl_name)
        return None if published is None else published.adapter.name

    # --- publishing -----------------------------------------------------------------------

    async def publish(self, trl_name: str, local_path: str) -> None:
        """Make the adapter durable, announce it, return by the quorum rule. Raises StoreError."""
        began = trio.current_time()
        published = await self._write(trl_name, Path(local_path))
        name = published.adapter.name
        self.known[trl_name] = published
        self._reports[name] = trio.Event()
        sent = await self.link.tell(published)
        report = await self._wait_for_report(name) if sent else None
        self.record(
            "sync",
            adapter=name,
            version=published.adapter.version,
            bytes=published.bytes,
            phases_s=published.phases_s,
            seconds=trio.current_time() - began,
            report=describe(report),
        )
        self._forget_oldest()

    async def _write(self, trl_name: str, folder: Path) -> m.Published:
        if not self.link.attempt:
            await self.link.registered()
        match = _VERSION.search(trl_name)
        version = int(match.group(1)) if match else len(self.known)
        private_key = self.join.run_private_key
        assert private_key is not None, "checked when the join was loaded"
        written = await trio.to_thread.run_sync(
            partial(
                bucket.publish,
                folder,
                Path(self.config.bucket.path) / self.join.run,
                run=self.join.run,
                attempt=self.link.attempt,
                version=version,
                base_model=self.config.model_name,
                base_model_digest=self.base_model_digest,
                private_key=private_key,
                live=list(self.live),
                now_unix_s=time.time(),  # noqa: TID251 - a role reads the clock
                max_rank=self.config.engine.max_lora_rank,
                mount=self.mount,
            ),
            abandon_on_cancel=True,
        )
        adapter = m.Adapter(
            written.adapter.name, self.link.attempt, version, written.adapter.digest
        )
        self.live.append(adapter.name)
        log.info(
            "adapter.published",
            adapter=adapter.name,
            bytes=written.total_bytes,
            **{f"{k}_s": v for k, v in written.phases_s.items()},
        )
        return self._published(adapter, written.commit_key, written.total_bytes, written.phases_s)

    def _published(
        self, adapter: m.Adapter, commit: str, size_bytes: int, phases_s: dict[str, float]
    ) -> m.Published:
        return m.Published(
            adapter=adapter,
            commit=commit,
            live=list(self.live),
            quorum=self.config.trainer.quorum,
            timeout_s=self.config.trainer.sync_timeout_s,
            bytes=size_bytes,
            phases_s=phases_s,
        )

    async def _wait_for_report(self, name: str) -> m.SyncReport | None:
        limit_s = self.config.trainer.sync_timeout_s + REPORT_MARGIN_S
        with trio.move_on_after(limit_s):
            await self._reports[name].wait()
        self._reports.pop(name, None)
        report = self._report.pop(name, None)
        if report is None:
            log.warning("sync.unreported", adapter=name, waited_s=limit_s)
        elif report.timed_out or report.failed:
            log.warning("sync.late", adapter=name, reason=report.reason, failed=report.failed)
        return report

    def reported(self, report: m.SyncReport) -> None:
        """The proxy says how far a publication has come."""
        waiting = self._reports.get(report.adapter.name)
        if waiting is not None:
            self._report[report.adapter.name] = report
            waiting.set()

    async def tell_again(self) -> None:
        """After a registration: the proxy may know nothing of this run."""
        for published in list(self.known.values()):
            if published.adapter.name in self.live:
                again = self._published(
                    published.adapter, published.commit, published.bytes, published.phases_s
                )
                await self.link.tell(again)

    def _forget_oldest(self) -> None:
        for trl_name in list(self.known)[:-KEPT_NAMES]:
            if self.known[trl_name].adapter.name not in self.live:
                del self.known[trl_name]

    # --- use and retirement ---------------------------------------------------------------

    def retire(self, trl_name: str) -> None:
        """TRL no longer needs this adapter; it goes once no rollout in flight names it."""
        name = self.physical_name(trl_name)
        if name is not None and name in self.live:
            self._retiring.add(name)
            self._wake.set()

    def begin(self, name: str) -> None:
        self._in_flight[name] += 1

    def finish(self, name: str) -> None:
        self._in_flight[name] -= 1
        if not self._in_flight[name]:
            del self._in_flight[name]
            self._wake.set()

    async def retire_idle(self) -> None:
        """For ever: tell the proxy of every retired name that nothing in flight uses."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            idle = [n for n in self._retiring if not self._in_flight[n]]
            self._retiring.difference_update(idle)
            if idle:
                self.live = [name for name in self.live if name not in idle]
                await self.link.tell(m.Retired(idle, list(self.live)))


def describe(report: m.SyncReport | None) -> dict[str, Any] | None:
    """A report as the history keeps it."""
    if report is None:
        return None
    return {
        "acked": report.acked,
        "missing": report.missing,
        "failed": report.failed,
        "timed_out": report.timed_out,
        "elapsed_s": report.elapsed_s,
    }
