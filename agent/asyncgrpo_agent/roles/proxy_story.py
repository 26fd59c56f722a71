"""What the proxy keeps of a run for those who look on, and the viewers who follow it live.

A viewer costs rollouts nothing: what is new is encoded once, put into a queue of bounded length for
each viewer, and whoever reads too slowly loses the queue and is told to load everything anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent.core.replicas import Transition
from asyncgrpo_agent.core.run_events import Event, EventLog, Kind, Severity
from asyncgrpo_agent.core.story import StepRow, Story, Told
from asyncgrpo_agent.core.sync_counts import SyncCounts
from asyncgrpo_agent.core.sync_rows import ReplicaSync, SyncRow
from asyncgrpo_agent.wire import messages as m

MAX_QUEUED: Final = 256  # messages that wait for one viewer
MAX_HISTORIES: Final = 16
MAX_SAMPLES: Final = 200
SEQS_A_SECOND: Final = 1000  # more than any run has events
RELOAD: Final = b"event: reload\ndata: {}\n\n"


@dataclass(slots=True, eq=False)
class Watcher:
    """One viewer who follows the run."""

    may_read_rollouts: bool = False
    _queue: deque[bytes] = field(default_factory=deque)
    _event: trio.Event = field(default_factory=trio.Event)
    fell_behind: bool = False

    def put(self, message: bytes) -> None:
        if self.fell_behind:
            return
        self._queue.append(message)
        if len(self._queue) > MAX_QUEUED:
            self._queue.clear()
            self._queue.append(RELOAD)
            self.fell_behind = True  # until it has taken the word
        self._event.set()

    async def take(self, most_s: float) -> bytes:
        """All that is new, b"" if nothing came in so many seconds."""
        with trio.move_on_after(most_s):
            await self._event.wait()
        self._event = trio.Event()
        data = b"".join(self._queue)
        self._queue.clear()
        self.fell_behind = False
        return data


@dataclass(slots=True)
class RunStory:
    """Of one run."""

    unix_time_s: Callable[[], float] = time.time  # noqa: TID251 - a role reads the clock
    story: Story = field(init=False)
    histories: dict[str, int] = field(default_factory=dict)  # of trainers: how far each is known
    samples: deque[m.SampledRollout] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    watchers: set[Watcher] = field(default_factory=set)
    sync_counts: SyncCounts = field(default_factory=SyncCounts)
    changes: int = 0  # of anything that is shown
    _syncs_to_tell: dict[str, SyncRow] = field(default_factory=dict)  # by adapter
    _is_replaying: bool = False

    def __post_init__(self) -> None:
        now = self.unix_time_s()
        events = EventLog(first_seq=int(now) * SEQS_A_SECOND)
        self.story = Story(events=events, since_unix_s=now)

    # --- what the trainer tells -----------------------------------------------------------

    def take(self, facts: m.Facts, measured: Mapping[str, float]) -> None:
        """A piece of a history; `measured` is what the proxy sees now, kept with each step."""
        if self.histories.get(facts.history, 0) != facts.start:
            return  # it crossed a registration and is known
        self.histories[facts.history] = facts.end
        while len(self.histories) > MAX_HISTORIES:
            del self.histories[next(iter(self.histories))]
        if facts.is_past:
            self._is_replaying = True
        elif self._is_replaying:
            self._is_replaying = False
            self._tell_all(RELOAD)
        for record in facts.records:
            for told in self.story.add(record):
                if facts.is_past:
                    continue
                if isinstance(told, StepRow):
                    self.story.sample(measured, told.unix_s)
                self._tell(told)
        self.changes += 1

    def sampled(self, rollout: m.SampledRollout) -> None:
        """One to read, for those who may."""
        self.samples.append(rollout)
        data = msgspec.json.encode(rollout)
        message = b"id: %d\nevent: rollout\ndata: %s\n\n" % (self.story.events.seq, data)
        for watcher in self.watchers:
            if watcher.may_read_rollouts:
                watcher.put(message)

    # --- what the proxy sees --------------------------------------------------------------

    def moved(self, transition: Transition, *, is_last: bool = False) -> None:
        now = self.unix_time_s()
        after, reason = transition.after.value, transition.reason
        self._tell(
            self.story.replica_moved(transition.replica, after, reason, now, is_last=is_last)
        )

    def published(self, message: m.Published) -> None:
        seconds = sum(message.phases_s.values())
        self._tell_row(
            self.story.syncs.published(
                message.adapter.name,
                started_unix_s=self.unix_time_s() - seconds,
                size_bytes=message.bytes,
                phases_s=message.phases_s,
            )
        )

    def acked(self, replica: str, ack: m.Ack, since_s: float) -> None:
        outcome = ReplicaSync(
            name=replica,
            ok=ack.ok,
            reason=ack.reason,
            since_announced_s=round(since_s, 4),
            phases_s=ack.phases_s,
        )
        self._tell_row(self.story.syncs.told(ack.adapter.name, outcome))
        if not ack.ok:
            self.sync_counts.refusals += 1
            text = f"{replica} refused version {ack.adapter.version}: {ack.reason}"
            self.say("sync", "warning", "adapter.refused", text, replica=replica)

    def synced(self, report: m.SyncReport) -> None:
        self.sync_counts.ended(
            report.adapter.name, quorum_s=report.elapsed_s, timed_out=report.timed_out
        )
        row = self.story.syncs.decided(
            report.adapter.name,
            quorum_s=report.elapsed_s,
            timed_out=report.timed_out,
            reason=report.reason,
        )
        if row is not None:
            self._tell(row)
            self._tell(self.story.synced(row, self.unix_time_s()))

    def ended(self, reason: str, *, ok: bool) -> None:
        self._tell(self.story.ended(reason, ok=ok, at=self.unix_time_s()))
        self._tell_all(b"event: ended\ndata: {}\n\n")

    def say(
        self,
        kind: Kind,
        severity: Severity,
        name: str,
        text: str,
        *,
        replica: str | None = None,
        duration_s: float | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        event = self.story.events.add(
            kind,
            severity,
            name,
            text,
            t_unix_s=self.unix_time_s(),
            replica=replica,
            duration_s=duration_s,
            fields=fields,
        )
        self._tell(event)

    # --- viewers --------------------------------------------------------------------------

    @contextmanager
    def watched(
        self, since_seq: int | None, *, may_read_rollouts: bool = False
    ) -> Iterator[Watcher]:
        """Follow what happens from now on, and what happened after the event `since_seq`."""
        watcher = Watcher(may_read_rollouts)
        missed = [] if since_seq is None else self.story.events.since(since_seq)
        if missed is None or len(missed) >= MAX_QUEUED:
            watcher.put(RELOAD)
        else:
            for event in missed:
                watcher.put(message_of(event, event.seq))
        self.watchers.add(watcher)
        try:
            yield watcher
        finally:
            self.watchers.discard(watcher)

    def tell_syncs(self) -> None:
        """Tell how far syncs have come. Each replica's part changes a row, and with many replicas
        the row is long, so that what comes together goes once."""
        rows, self._syncs_to_tell = self._syncs_to_tell, {}
        for row in rows.values():
            self._tell_all(message_of(row, self.story.events.seq))

    def _tell_row(self, row: SyncRow | None) -> None:
        if row is not None:
            self._tell(row)

    def _tell(self, told: Told) -> None:
        self.changes += 1
        if isinstance(told, SyncRow):
            if self.watchers:
                self._syncs_to_tell[told.adapter] = told
        elif self.watchers:
            seq = told.seq if isinstance(told, Event) else self.story.events.seq
            self._tell_all(message_of(told, seq))

    def _tell_all(self, message: bytes) -> None:
        for watcher in self.watchers:
            watcher.put(message)


def message_of(told: Told, seq: int) -> bytes:
    """As a server-sent event."""
    kind = {StepRow: "step", SyncRow: "sync", Event: "note"}[type(told)]
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (seq, kind.encode(), msgspec.json.encode(told))
