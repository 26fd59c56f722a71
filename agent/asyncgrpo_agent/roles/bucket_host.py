"""The bucket as the roles see it: calls that end in time, whatever the mount does.

A worker process makes them (`store.mount_worker`); nothing in this process touches the mount. One
call runs at a time. A worker that gives no sign of life is killed, left alone, and remembered: its
mount hangs for as long as it lives. Until then few others are sent after it, later and later, and
calls fail at once. A mount that was taken away and mounted anew is a new one, with a fresh start.

What was mounted when the first worker looked is handed to all later ones, so that a bare mount
point is never taken for the bucket.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.core.adapters import Attempt
from asyncgrpo_agent.core.checkpoints import Checkpoint, CheckpointKey
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.segments import SegmentKey
from asyncgrpo_agent.errors import BucketUnavailableError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles import bucket_worker
from asyncgrpo_agent.roles.bucket_worker import BucketWorker, EndedError, SilentError
from asyncgrpo_agent.store import mount_calls as calls
from asyncgrpo_agent.store.bucket import ListedCommit, PublishedAdapter
from asyncgrpo_agent.store.checkpoints import SavedCheckpoint
from asyncgrpo_agent.store.mount_calls import CheckpointProgress
from asyncgrpo_agent.store.mounts import KnownMount, Mount, MountWatch, is_remote
from asyncgrpo_agent.store.staging import StagedAdapter

log = Log(__name__)

SILENCE_S: Final = 10.0
MIN_BACKOFF_S: Final = 10.0
MAX_BACKOFF_S: Final = 60.0
MAX_ABANDONED: Final = 3
_KILLED_S: Final = 0.2  # who ends within this time is not held by the mount
_LET_GO_S: Final = 1.0
_FAREWELL_S: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A worker that was killed and has not ended yet."""

    worker: BucketWorker
    call: str
    since: float
    mount_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HungCall:
    """What the status says of an abandoned worker."""

    pid: int
    call: str
    seconds: float


class BucketHost:
    """The calls on one run's folder. They raise StoreError and its kinds, as `store` says."""

    def __init__(
        self,
        bucket_path: str,
        run: str,
        agent: Agent,
        *,
        changed: Callable[[], None] = lambda: None,
        silence_s: float = SILENCE_S,
        min_backoff_s: float = MIN_BACKOFF_S,
    ) -> None:
        """`changed` is called when a watched attempt may have new commits."""
        folder = os.path.abspath(bucket_path)
        self._run_dir = Path(folder) / run
        self._agent = agent
        self._changed = changed
        self._silence_s = silence_s
        self._min_backoff_s = self._backoff_s = min_backoff_s
        self._next_try_at = 0.0
        self._hung_mount_id = 0
        self._known: KnownMount | None = None
        self._mount = MountWatch(Path(folder), KnownMount(path=folder, mount=None))
        self._lock = trio.Lock()
        self._worker: BucketWorker | None = None
        self._abandoned: list[Abandoned] = []
        self._nursery: trio.Nursery | None = None
        self.worker_starts = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BucketHost]:
        """Calls can be made inside. Begins to look at the mount at once, and does not wait."""
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._open_early)
                try:
                    yield self
                except BaseException as error:  # raised below, where no nursery wraps it
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            await self._end()  # only now: nobody can be about to start a worker
        if failure is not None:
            raise failure

    async def _open_early(self) -> None:
        try:
            await self.mount()
        except StoreError as error:
            log.warning("bucket.unavailable", reason=str(error))

    async def _end(self) -> None:
        """A worker that is well ends by this; another is not waited for."""
        self._nursery = None
        if self._worker is not None:
            worker = self._worker
            self._leave(worker, "")
            with trio.move_on_after(_FAREWELL_S if worker.is_idle else 0.0, shield=True):
                await worker.ended()
        self._forget_ended()

    # --- calls ----------------------------------------------------------------------------

    async def mount(self) -> Mount | None:
        """What the bucket is on, as the first worker found it."""
        async with self._lock:
            await self._ready()
        return self._mount.expected

    async def list_runs(self) -> list[str]:
        return await self._call(calls.ListRuns(), list[str])

    async def list_attempts(self) -> list[Attempt]:
        return await self._call(calls.ListAttempts(), list[Attempt])

    async def list_commits(
        self, attempt: str, after_version: int, *, whole: bool = False
    ) -> list[str]:
        call = calls.ListCommits(attempt=attempt, after_version=after_version, whole=whole)
        return await self._call(call, list[str])

    async def list_versions(self) -> dict[str, list[int]]:
        return await self._call(calls.ListVersions(), dict[str, list[int]])

    async def list_torn(self) -> dict[str, list[int]]:
        return await self._call(calls.ListTorn(), dict[str, list[int]])

    async def prune(self, attempt: str, version: int) -> int:
        return await self._call(calls.Prune(attempt=attempt, version=version), int)

    async def read_commit(self, key: str, *, run: str, public_key: bytes | None) -> ListedCommit:
        call = calls.ReadCommit(key=key, run=run, public_key=public_key)
        return await self._call(call, ListedCommit)

    async def list_results(self) -> list[str]:
        return await self._call(calls.ListResults(), list[str])

    async def read_result(self, key: str, *, run: str, public_key: bytes | None) -> ListedCommit:
        call = calls.ReadResult(key=key, run=run, public_key=public_key)
        return await self._call(call, ListedCommit)

    async def stage(self, commit: Commit, staging_dir: Path, *, max_rank: int) -> StagedAdapter:
        call = calls.Stage(commit=commit, staging_dir=staging_dir, max_rank=max_rank)
        return await self._call(call, StagedAdapter)

    async def publish(
        self,
        local_dir: Path,
        *,
        run: str,
        attempt: str,
        version: int,
        base_model: str,
        base_model_digest: str,
        private_key: bytes,
        live: Sequence[str],
        now_unix_s: float,
        max_rank: int,
        is_result: bool = False,
    ) -> PublishedAdapter:
        call = calls.Publish(
            local_dir=local_dir,
            run=run,
            attempt=attempt,
            version=version,
            base_model=base_model,
            base_model_digest=base_model_digest,
            private_key=private_key,
            live=list(live),
            now_unix_s=now_unix_s,
            max_rank=max_rank,
            is_result=is_result,
        )
        return await self._call(call, PublishedAdapter)

    async def list_checkpoints(self) -> dict[str, list[CheckpointKey]]:
        return await self._call(calls.ListCheckpoints(), dict[str, list[CheckpointKey]])

    async def list_torn_checkpoints(self) -> dict[str, list[CheckpointKey]]:
        return await self._call(calls.ListTornCheckpoints(), dict[str, list[CheckpointKey]])

    async def read_checkpoint(
        self, key: CheckpointKey, *, run: str, public_key: bytes
    ) -> Checkpoint:
        call = calls.ReadCheckpoint(key=key, run=run, public_key=public_key)
        return await self._call(call, Checkpoint)

    async def publish_checkpoint(
        self, saved: SavedCheckpoint, slice_s: float
    ) -> CheckpointProgress:
        """Begin to copy one; `continue_checkpoint` until it is published."""
        call = calls.PublishCheckpoint(saved=saved, slice_s=slice_s)
        return await self._call(call, CheckpointProgress)

    async def continue_checkpoint(self, step: int, slice_s: float) -> CheckpointProgress:
        call = calls.ContinueCheckpoint(step=step, slice_s=slice_s)
        return await self._call(call, CheckpointProgress)

    async def restore_checkpoint(self, checkpoint: Checkpoint, target_dir: Path) -> None:
        call = calls.RestoreCheckpoint(checkpoint=checkpoint, target_dir=target_dir)
        await self._call(call, type(None))

    async def prune_checkpoint(self, key: CheckpointKey) -> int:
        return await self._call(calls.PruneCheckpoint(key=key), int)

    async def write_segment(self, attempt: str, number: int, data: bytes) -> str:
        call = calls.WriteSegment(attempt=attempt, number=number, data=data)
        return await self._call(call, str)

    async def list_segments(self, run: str = "") -> list[SegmentKey]:
        return await self._call(calls.ListSegments(run=run), list[SegmentKey])

    async def read_segments(self, keys: Sequence[SegmentKey], run: str = "") -> list[bytes]:
        return await self._call(calls.ReadSegments(keys=list(keys), run=run), list[bytes])

    async def list_recorded_runs(self) -> list[str]:
        return await self._call(calls.ListRecordedRuns(), list[str])

    async def watch(self, attempt: str) -> bool:
        """Have the attempt watched, if it is not; to be called again whenever workers may change.

        False on mounts, where nothing tells of a change by another host: the caller has to look.
        Where it is watched that is a hint, and the caller looks from time to time in any case.
        """
        async with self._lock:
            worker = await self._ready()
            if self._mount.remote:
                return False
            if worker.watched != attempt:
                await self._ask(worker, calls.Watch(attempt=attempt), type(None))
                worker.watched = attempt
            return True

    def hung_calls(self) -> list[HungCall]:
        """For the status: the workers that the mount holds, oldest first."""
        self._note_released()
        now = trio.current_time()
        return [
            HungCall(pid=one.worker.pid, call=one.call, seconds=now - one.since)
            for one in self._abandoned
        ]

    def hung(self) -> str:
        """The same in words, with the mount named; empty while nothing hangs."""
        held = self.hung_calls()
        if not held:
            return ""
        calls = ", ".join(f"pid {one.pid} in {one.call} for {one.seconds:.0f} s" for one in held)
        return f"{self._mount.found() or self._run_dir} does not answer and holds {calls}"

    # --- workers --------------------------------------------------------------------------

    async def _call(self, call: calls.Call, kind: type[T]) -> T:
        async with self._lock:
            return await self._ask(await self._ready(), call, kind)

    async def _ask(self, worker: BucketWorker, call: calls.Call, kind: type[T]) -> T:
        began = trio.current_time()
        try:
            answer = await worker.ask(call)
        except SilentError:
            raise await self._abandon(worker, call, began) from None
        except EndedError:
            raise self._ended_error(worker, call) from None
        self._backoff_s = self._min_backoff_s
        if isinstance(answer, calls.Failure):
            raise calls.error_of(answer)
        return calls.value_of(answer, kind)

    async def _ready(self) -> BucketWorker:
        """The worker, a new one if need be. Raises BucketUnavailableError."""
        known = self._worker
        if known is not None and not (known.is_usable and known.is_open):
            self._leave(known, "a call that was given up")
        if self._worker is None:
            self._check_hung()
            assert self._nursery is not None, "calls are made while it is running"
            worker = await bucket_worker.start(self._changed, self._silence_s)
            self.worker_starts += 1
            self._nursery.start_soon(worker.run)
            self._worker = worker
            await self._open(worker)
        return self._worker

    async def _open(self, worker: BucketWorker) -> None:
        call = calls.Open(
            run_dir=self._run_dir,
            known=self._known,
            log_json=self._agent.log_json,
            log_level=self._agent.log_level.upper(),
        )
        known = await self._ask(worker, call, KnownMount)
        worker.is_open = True
        if self._known is None:
            self._known, self._mount = known, MountWatch(self._run_dir.parent, known)
        mount, remote = self._mount.expected, self._mount.remote
        log.info("bucket.opened", path=self._run_dir, mount=mount, remote=remote, pid=worker.pid)

    def _leave(self, worker: BucketWorker, call: str) -> None:
        """Have nothing more to do with it; remember it while it lives."""
        worker.leave()
        self._worker = None
        if worker.returncode is None:
            self._abandoned.append(
                Abandoned(
                    worker=worker, call=call, since=trio.current_time(), mount_id=self._mount_id()
                )
            )

    async def _abandon(
        self, worker: BucketWorker, call: calls.Call, began: float
    ) -> BucketUnavailableError:
        name, seconds = calls.shown(call), trio.current_time() - began
        self._leave(worker, name)
        self._hung_mount_id = self._mount_id()
        log.warning(
            "mount.hung",
            mount=self._mount.found(),
            path=self._run_dir,
            call=name,
            seconds=seconds,
            abandoned_pid=worker.pid,
        )
        with trio.move_on_after(_KILLED_S):
            await worker.ended()
        self._next_try_at = trio.current_time() + min(self._min_backoff_s, _LET_GO_S)
        if worker.returncode is None:  # else the mount let go of it, and none are piling up
            self._next_try_at = trio.current_time() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._forget_ended()
        return self._hung_error(f"{name} for {seconds:.0f} s")

    def _check_hung(self) -> None:
        """Whether to send another worker. Raises BucketUnavailableError."""
        self._note_released()
        is_early = trio.current_time() < self._next_try_at
        if not is_early and not self._abandoned:
            return
        self._mount.check()
        mount_id = self._mount_id()
        held = sum(one.mount_id == mount_id for one in self._abandoned)
        if mount_id == self._hung_mount_id and (is_early or held >= MAX_ABANDONED):
            raise self._hung_error(f"it holds {held} of the agent's processes")

    def _note_released(self) -> None:
        """When all are free the mount answers again."""
        ended = self._forget_ended()
        for one in ended:
            held_s = trio.current_time() - one.since
            log.info("mount.released", pid=one.worker.pid, call=one.call, held_s=held_s)
        if ended and not self._abandoned:
            self._next_try_at = trio.current_time()

    def _forget_ended(self) -> list[Abandoned]:
        ended = [one for one in self._abandoned if one.worker.returncode is not None]
        self._abandoned = [one for one in self._abandoned if one not in ended]
        return ended

    def _mount_id(self) -> int:
        found = self._mount.found()
        return 0 if found is None else found.mount_id

    def _hung_error(self, call: str) -> BucketUnavailableError:
        found = self._mount.found()
        fix = "See the system's log for what is wrong with the disk under it"
        if found is not None and is_remote(found):
            fix = (
                f"If {found} does not recover: `umount -l {found.mount_point}` and start its "
                "daemon again; the agent goes on by itself"
            )
        return BucketUnavailableError(
            f"the mount does not answer ({call})", where=str(self._run_dir), fix=fix
        )

    def _ended_error(self, worker: BucketWorker, call: calls.Call) -> BucketUnavailableError:
        self._leave(worker, calls.shown(call))
        code = worker.returncode
        return BucketUnavailableError(
            f"the bucket's worker ended during {calls.shown(call)} with exit status {code}",
            where=str(self._run_dir),
            fix="It is started again; for -9 see the kernel's log, it may be out of memory",
        )
