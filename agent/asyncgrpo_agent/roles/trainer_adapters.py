"""TRL's adapters on their way out: publish, announce, wait for the quorum, retire.

TRL's names (`trl-policy-v7`) restart with every resume, physical names never do. This module alone
maps one to the other, and keeps the live window: the names that TRL has loaded and not unloaded.
A name is retired only when no rollout in flight uses it.

Anything but a commit that cannot be written is no error towards TRL, which would die of it.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.retention import NAMED_S
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

REPORT_MARGIN_S: Final = 5.0  # beyond the sync's own deadline, for a proxy that went away
# TRL's load call ends after 1800 s (vllm_client.load_lora_adapter), and the run with it. A reason
# that comes before that is read by somebody.
LOAD_CALL_S: Final = 1770.0
BUCKET_PATIENCE_S: Final = LOAD_CALL_S - 30.0
KEPT_NAMES: Final = 64
# An evaluation names one version again and again, long after TRL is done with it. Between two of
# its answers nothing in flight names that, and it must not be unloaded and loaded each time.
PINNED_S: Final = 15.0

Record = Callable[..., None]  # (kind, **fields)
_VERSION = re.compile(r"-v(\d+)\Z")


@dataclass(slots=True, eq=False)
class Waiting:
    """One load call that waits for the proxy's report. Two may be about one name."""

    name: str
    report: m.SyncReport | None = None
    told: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class Adapters:
    """All adapters of this attempt."""

    config: Config
    join: Join
    link: TrainerLink
    bucket: BucketHost
    turns: Turns
    base_model_digest: str
    record: Record
    max_rank: Callable[[], int]  # that the fleet's engines have room for
    on_written: Callable[[PublishedAdapter, Path], None] = lambda written, folder: None
    known: dict[str, m.Published] = field(default_factory=dict)  # TRL name -> publication
    live: list[str] = field(default_factory=list)  # physical names, newest last
    is_put_off: bool = False  # the bucket takes nothing now
    _in_flight: Counter[str] = field(default_factory=Counter)
    _named_at: dict[str, float] = field(default_factory=dict)  # physical names
    _retiring: set[str] = field(default_factory=set)
    _pinned_until: dict[str, float] = field(default_factory=dict)  # physical names
    _waiting: list[Waiting] = field(default_factory=list)
    _unwritten: int = 0  # publications that wait for the bucket
    _wake: trio.Event = field(default_factory=trio.Event)
    _next_version: int = 0  # of a name without a number

    def physical_name(self, trl_name: str) -> str | None:
        published = self.known.get(trl_name)
        return None if published is None else published.adapter.name

    # --- publishing -----------------------------------------------------------------------

    async def publish(self, trl_name: str, local_path: str) -> None:
        """Make the adapter durable, announce it, return by the quorum rule. Raises StoreError."""
        began = trio.current_time()
        with self.turns.publishing():
            published = await self._write(trl_name, Path(local_path))
        uploaded_s = trio.current_time() - began
        name = published.adapter.name
        self.known[trl_name] = published
        self._retiring.discard(name)
        waiting = Waiting(name)
        self._waiting.append(waiting)
        try:
            sent = await self.link.tell(published)
            told_s = trio.current_time() - began
            self.record(
                "published",
                adapter=name,
                live=published.live,
                uploaded_s=uploaded_s,
                announced_s=told_s if sent else None,
                seconds=told_s,
            )
            report = await self._report(waiting, LOAD_CALL_S - told_s) if sent else None
        finally:
            self._waiting.remove(waiting)
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
        version = int(match.group(1)) if match else self._next_version
        self._next_version = max(self._next_version, version + 1)
        private_key = self.join.run_private_key
        assert private_key is not None, "checked when the join was loaded"
        written = await self._patiently(
            trl_name,
            partial(
                self.bucket.publish,
                folder,
                run=self.join.run,
                attempt=self.link.attempt,
                version=version,
                base_model=self.config.model_name,
                base_model_digest=self.base_model_digest,
                private_key=private_key,
                live=self.live,
                now_unix_s=time.time(),  # noqa: TID251 - a role reads the clock
                max_rank=self.max_rank(),
            ),
        )
        self.on_written(written, folder)
        adapter = m.Adapter(
            written.adapter.name, self.link.attempt, version, written.adapter.digest
        )
        if adapter.name not in self.live:  # else this is the second call for one adapter
            self.live.append(adapter.name)
        log.info(
            "adapter.published",
            adapter=adapter.name,
            bytes=written.total_bytes,
            **{f"{k}_s": v for k, v in written.phases_s.items()},
        )
        return m.Published(
            adapter=adapter,
            commit=written.commit_key,
            live=list(self.live),
            quorum=self.config.trainer.quorum,
            timeout_s=self.config.trainer.sync_timeout_s,
            bytes=written.total_bytes,
            phases_s=written.phases_s,
            folder=written.folder,
        )

    async def _patiently(
        self, trl_name: str, publish: Callable[[], Awaitable[PublishedAdapter]]
    ) -> PublishedAdapter:
        """Mounts come back, and TRL can wait; what it could not take is a refusal."""
        backoff, deadline = Backoff(SystemRandom()), trio.current_time() + BUCKET_PATIENCE_S
        self._unwritten += 1
        try:
            while True:
                try:
                    return await publish()
                except BucketUnavailableError as error:
                    delay_s = backoff.next_delay_s()
                    if trio.current_time() + delay_s > deadline:
                        raise
                    self._tell_unpublished(trl_name, str(error), delay_s)
                await trio.sleep(delay_s)
        finally:
            self._unwritten -= 1
            self.is_put_off = False

    def _tell_unpublished(self, trl_name: str, reason: str, delay_s: float) -> None:
        self.is_put_off = True
        hung = self.bucket.hung()
        notifier.status(f"bucket: {hung or reason}")
        held = {"hung": hung} if hung else {}
        log.warning("adapter.unpublished", adapter=trl_name, reason=reason, **held, in_s=delay_s)

    @property
    def is_unwritten(self) -> bool:
        """Whether TRL waits for the bucket."""
        return self._unwritten > 0

    @property
    def in_flight(self) -> int:
        """Rollouts that TRL waits for."""
        return self._in_flight.total()

    async def _report(self, waiting: Waiting, left_s: float) -> m.SyncReport | None:
        limit_s = min(self.config.trainer.sync_timeout_s + REPORT_MARGIN_S, max(0.0, left_s))
        with trio.move_on_after(limit_s):
            await waiting.told.wait()
        report, name = waiting.report, waiting.name
        if report is None:
            log.warning("sync.unreported", adapter=name, waited_s=limit_s)
        elif report.timed_out or report.failed:
            log.warning("sync.late", adapter=name, reason=report.reason, failed=report.failed)
        return report

    def reported(self, report: m.SyncReport) -> None:
        """The proxy says how far a publication has come."""
        for waiting in self._waiting:
            if waiting.name == report.adapter.name:
                waiting.report = report
                waiting.told.set()

    async def tell_again(self) -> None:
        """After a registration: the proxy may know nothing of this run."""
        for published in list(self.known.values()):
            if published.adapter.name in self.live:
                again = msgspec.structs.replace(published, live=list(self.live))
                await self.link.tell(again)

    def _forget_oldest(self) -> None:
        for trl_name in list(self.known)[:-KEPT_NAMES]:
            if self.known[trl_name].adapter.name not in self.live:
                del self.known[trl_name]
        self.named_at()

    # --- use and retirement ---------------------------------------------------------------

    def retire(self, trl_name: str) -> None:
        """TRL no longer needs this adapter; it goes once no rollout in flight names it."""
        name = self.physical_name(trl_name)
        if name is not None and name in self.live:
            self._retiring.add(name)
            self._wake.set()

    def named_at(self) -> dict[str, float]:
        """When a rollout last named each physical name; what was named long ago is forgotten."""
        now = trio.current_time()
        recent = {name: at for name, at in self._named_at.items() if now - at < NAMED_S}
        self._named_at = {**recent, **dict.fromkeys(self._in_flight, now)}
        return dict(self._named_at)

    def begin(self, name: str, *, is_evaluated: bool = False) -> None:
        now = trio.current_time()
        self._in_flight[name] += 1
        self._named_at[name] = now
        if is_evaluated:
            self._pinned_until[name] = now + PINNED_S

    def finish(self, name: str) -> None:
        now = trio.current_time()
        self._named_at[name] = now
        if name in self._pinned_until:
            self._pinned_until[name] = now + PINNED_S
        self._in_flight[name] -= 1
        if not self._in_flight[name]:
            del self._in_flight[name]
            self._wake.set()

    async def retire_idle(self) -> None:
        """For ever: tell the proxy of every retired name that nothing in flight uses."""
        while True:
            resting = self._retiring & self._pinned_until.keys() - self._in_flight.keys()
            due = min((self._pinned_until[name] for name in resting), default=math.inf)
            with trio.move_on_at(due):
                await self._wake.wait()
            self._wake, now = trio.Event(), trio.current_time()
            over = {name for name in resting if self._pinned_until[name] <= now}
            for name in over - self._in_flight.keys():
                del self._pinned_until[name]
            busy = self._in_flight.keys() | self._pinned_until.keys()
            idle = [name for name in self._retiring if name not in busy]
            self._retiring.difference_update(idle)
            if idle:
                self.live = [name for name in self.live if name not in idle]
                self.record("retired", names=idle, live=list(self.live))
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
