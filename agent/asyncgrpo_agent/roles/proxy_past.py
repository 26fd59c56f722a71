"""Runs that the proxy does not have and its bucket does; they are read when they are asked for.

The bucket is optional and only read. Its calls end in time and run beside everything else; a bucket
that is away takes past runs off the list of nobody and costs rollouts nothing. A run that was read
is kept for as long as few others are asked for. Records are folded in a thread, a segment at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core import trl_metrics
from asyncgrpo_agent.core.segments import Joined, decode
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.report import facts as report
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.bucket_mount import keep_mounted, mount_spec
from asyncgrpo_agent.roles.proxy_snapshot import NEWEST_EVENTS, NEWEST_SYNCS, REWARD_STEPS
from asyncgrpo_agent.store.mounts import mounted_at

log = Log(__name__)

LOOK_EVERY_S: Final = 300.0
FIRST_LOOKS_S: Final = 5.0  # until one look went well, as a mount may take a moment
MAX_RUNS: Final = 200  # that are listed
KEPT: Final = 4  # runs that were read
MAX_LOADING: Final = 8  # that are asked for at once
PATIENCE_S: Final = 20.0  # of one request; the reading goes on
_ANY_RUN: Final = "-"  # cannot be the name of one


class NotReadError(Exception):
    """The run is being read, or the bucket is away: try again in a while. It says which."""


@dataclass(slots=True)
class PastRuns:
    """Of one proxy. `live` are the runs that it has itself."""

    config: Config
    live: Collection[str]
    names: list[str] = field(default_factory=list)
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the list, once known
    _kept: dict[str, Run] = field(default_factory=dict)  # the last that was asked for comes last
    _loading: dict[str, trio.Event] = field(default_factory=dict)
    _problem: str = ""
    _bucket: BucketHost | None = None
    _nursery: trio.Nursery | None = None
    _turn: trio.Lock = field(default_factory=trio.Lock)

    async def serve(self) -> None:
        """For ever, or not at all without a bucket."""
        bucket = self.config.bucket
        if not bucket.path or bucket.source == "link":
            return
        async with trio.open_nursery() as nursery:
            if bucket.url:
                if self.config.role == "proxy":  # a trainer mounts its own
                    nursery.start_soon(self._mount)
                await self._mounted()
            host = BucketHost(bucket.path, _ANY_RUN, self.config.agent)
            async with host.running():
                self._bucket, self._nursery = host, nursery
                await self._keep_looking()

    async def _mount(self) -> None:
        try:
            await keep_mounted(self.config)
        except AgentError as error:
            log.error("past_runs.unmounted", reason=str(error))

    async def _mounted(self) -> None:
        """Until then the folder is bare, and would be taken for an empty bucket for ever."""
        point = Path(mount_spec(self.config).mount_point)
        while mounted_at(point) is None:  # noqa: ASYNC110 - the mount table tells nobody
            await trio.sleep(FIRST_LOOKS_S)

    async def _keep_looking(self) -> None:
        while True:
            went_well = await self._look()
            await self._glance()
            await trio.sleep(LOOK_EVERY_S if went_well else FIRST_LOOKS_S)

    async def _look(self) -> bool:
        assert self._bucket is not None, "it is running"
        try:
            found = await self._bucket.list_recorded_runs()
        except AgentError as error:
            if str(error) != self._problem:
                log.warning("past_runs.unlisted", reason=str(error))
            self._problem = str(error)
            return False
        if len(found) > MAX_RUNS:
            log.warning("past_runs.left_out", runs=len(found) - MAX_RUNS)
        self.names, self._problem = found[:MAX_RUNS], ""
        for name in set(self._rows) & set(self.live):  # it goes on, and will be another
            del self._rows[name]
            self._kept.pop(name, None)
        return True

    async def _glance(self) -> None:
        """Read the end of each run that nobody has asked for, which says how far it came."""
        assert self._bucket is not None, "it is running"
        for name in self.names:
            if name in self._rows or name in self.live:
                continue
            try:
                async with self._turn:
                    self._rows[name] = await self._ends(self._bucket, name)
            except AgentError as error:
                log.warning("past_run.unread", run=name, reason=str(error))

    async def _ends(self, bucket: BucketHost, name: str) -> dict[str, Any]:
        run, keys = Run(name=name), await bucket.list_segments(name)
        for data in await bucket.read_segments(keys[-1:], name):
            await trio.to_thread.run_sync(_fold, run, Joined(), data)
        row = run_row(name, run)
        if len(keys) > 1:
            row |= {"attempt": keys[-1].attempt, "since_unix_s": None, "verdict": None}
        return row

    # --- what is shown --------------------------------------------------------------------

    def rows(self, shows: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Lines in the list of runs; what was not read yet is not known."""
        return [
            self._rows.get(name) or run_row(name, None)
            for name in self.names
            if name not in self.live and shows(name)
        ]

    async def find(self, name: str) -> Run | None:
        """The run, None if there is none of that name. Raises NotReadError."""
        if name not in self.names or name in self.live:
            return None
        if name not in self._kept:
            with trio.move_on_after(PATIENCE_S):
                await self._begin(name).wait()
        if name not in self._kept:
            raise NotReadError(self._problem or f"run {name} is being read")
        self._kept[name] = found = self._kept.pop(name)
        return found

    # --- reading --------------------------------------------------------------------------

    def _begin(self, name: str) -> trio.Event:
        if name not in self._loading:
            if len(self._loading) >= MAX_LOADING or self._nursery is None:
                raise NotReadError("other runs are being read")
            self._loading[name] = trio.Event()
            self._nursery.start_soon(self._load, name)
        return self._loading[name]

    async def _load(self, name: str) -> None:
        try:
            async with self._turn:
                self._kept[name] = run = await self._read(name)
                self._rows[name] = run_row(name, run)
                while len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
        except AgentError as error:
            self._problem = str(error)
            log.warning("past_run.unread", run=name, reason=str(error))
        finally:
            self._loading.pop(name).set()

    async def _read(self, name: str) -> Run:
        assert self._bucket is not None, "it is running"
        run, joined = Run(name=name), Joined()
        keys = await self._bucket.list_segments(name)
        while keys:
            found = await self._bucket.read_segments(keys, name)
            for data in found:
                await trio.to_thread.run_sync(_fold, run, joined, data)
            keys = keys[len(found) :]
        log.info("past_run.read", run=name, records=run.records)
        return run


def _fold(run: Run, joined: Joined, data: bytes) -> None:
    """Whoever can write to the bucket wrote it, which must not end the proxy whatever it is."""
    try:
        segment = decode(data)
        if segment is not None:
            run.add_all(joined.add(segment))
    except Exception:
        log.exception("past_run.senseless", run=run.name)


# --- as the API has it -----------------------------------------------------------------------


def run_row(name: str, run: Run | None) -> dict[str, Any]:
    """One line in the list of runs, as of a run that is live."""
    row: dict[str, Any] = {"name": name, "state": "past", "trainer": False}
    row |= {"ready": 0, "registered": 0}
    unknown = ("attempt", "since_unix_s", "step", "max_steps", "phase", "reward", "verdict")
    row |= dict.fromkeys((*unknown, "cost", "replica_hours"))
    row["ratio_by_class"] = {}
    if run is None:
        return row
    story = run.story
    newest = list(story.recent)[-REWARD_STEPS:]
    rewards = [
        value
        for step in newest
        if (value := trl_metrics.value_of(step.values, trl_metrics.REWARD)) is not None
    ]
    counted = story.totals if "replica_hours" in story.totals else story.traffic
    return row | {
        "attempt": story.attempt or None,
        "since_unix_s": story.started_unix_s or None,
        "step": story.step,
        "max_steps": story.max_steps or None,
        "phase": story.phase or None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "ratio_by_class": trl_metrics.mean_ratios([step.values for step in newest]),
        "verdict": report.verdict(run),
        "cost": counted.get("cost"),
        "replica_hours": counted.get("replica_hours"),
    }


def snapshot(name: str, run: Run) -> dict[str, Any]:
    """The same as of a run that is live, without what is of the moment."""
    story, row = run.story, run_row(name, run)
    return {
        "run": row,
        "verdict": row["verdict"],
        "alerts": [],
        "replicas": [],
        "routing": _routing(run),
        "series_names": story.series.names,
        "facts": _facts(run),
        "seq": story.events.seq,
        "syncs": msgspec.to_builtins(story.syncs.find(limit=NEWEST_SYNCS)),
        "events": msgspec.to_builtins(story.events.find(limit=NEWEST_EVENTS)),
    }


def _routing(run: Run) -> dict[str, Any]:
    totals = run.story.totals
    counted = ("held_s", "retried", "duplicates", "delayed")
    unknown = ("affinity_limit", "refused", "retries_per_success")
    return {
        "shares": totals.get("routed") or {},
        "waiting": 0,
        "oldest_wait_s": 0.0,
        **{name: totals.get(name) for name in counted},
        **dict.fromkeys(unknown),
    }


def _facts(run: Run) -> dict[str, Any]:
    story = run.story
    about, limits = story.about, story.limits
    settings = about.get("settings")
    known = settings if isinstance(settings, dict) else {}
    trl_version = str(story.versions.get("trl", ""))
    return {
        "model": about.get("model") or None,
        "trl_version": trl_version or None,
        "vllm_version": about.get("vllm_version") or None,
        "agent_version": about.get("agent_version") or None,
        "sync_mode": "adapters by name, without a pause",
        "max_staleness": known.get("max_staleness"),
        "weight_sync_steps": limits.get("weight_sync_steps"),
        "queue_maxsize": limits.get("queue_maxsize"),
        "max_inflight_tasks": limits.get("max_inflight_tasks"),
        "trl_names": trl_metrics.naming_of(trl_version),
    }
