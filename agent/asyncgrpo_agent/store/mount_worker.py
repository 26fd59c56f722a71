"""The mount's worker: the one process that touches the bucket.

A mount whose daemon hangs keeps whoever asks it for anything in the kernel, where SIGKILL does not
reach, and with a thread its whole process. So the agent asks this process, waits for a limited
time, and goes on without it when it does not answer. It ends when its standard input does: the
agent closed it or is dead. Nothing here starts, mounts, or decides anything.

Calls run one after another in the main thread, which alone may be lost to the mount beside the
watcher's. Standard output carries frames only; what is logged goes to standard error.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Final

from asyncgrpo_agent import logs
from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.core.commits import RESULTS, VERSIONS
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store import bucket, checkpoints, mount_calls, retention, segments, staging
from asyncgrpo_agent.store.heartbeat import Heartbeat
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mount_calls import (
    Alive,
    Answer,
    Call,
    Changed,
    CheckpointProgress,
    ContinueCheckpoint,
    ListAttempts,
    ListCheckpoints,
    ListCommits,
    ListRecordedRuns,
    ListResults,
    ListRuns,
    ListSegments,
    ListTorn,
    ListTornCheckpoints,
    ListVersions,
    Open,
    Prune,
    PruneCheckpoint,
    Publish,
    PublishCheckpoint,
    ReadCheckpoint,
    ReadCommit,
    ReadResult,
    ReadSegments,
    Request,
    RestoreCheckpoint,
    Stage,
    Watch,
    WriteSegment,
)
from asyncgrpo_agent.store.mounts import KnownMount, MountWatch
from asyncgrpo_agent.store.objects import Sliced

log = Log(__name__)

BEAT_S: Final = 0.25
SLOWEST_BYTES_PER_S: Final = 10e6  # at which a file may be uploaded in one silent step
_READ_BYTES: Final = 1 << 16
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Answer until standard input ends, which ends the process wherever it is."""
    for number in _IGNORED:  # the agent gets them too, and may still need this process
        signal.signal(number, signal.SIG_IGN)
    speaker = Speaker(os.dup(1))
    os.dup2(2, 1)  # a stray print must not look like a frame
    waiting: SimpleQueue[Request] = SimpleQueue()
    Thread(target=_listen, args=(waiting,), daemon=True).start()
    folder = RunFolder(speaker)
    while True:
        folder.answer(waiting.get())


def _listen(waiting: SimpleQueue[Request]) -> None:
    status = 1
    try:
        frames = mount_calls.requests()
        while data := os.read(0, _READ_BYTES):
            for request in frames.feed(data):
                waiting.put(request)
        status = 0
    except Exception:
        log.exception("mount_worker.deaf")
    finally:
        os._exit(status)  # not `sys.exit`, which would wait for the main thread


class Speaker(Heartbeat):
    """Writes answers, and signs of life of the current call, a few a second."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = Lock()
        self._done_bytes = 0
        self._told_at = 0.0

    def say(self, answer: Answer) -> None:
        with self._lock:
            rest = memoryview(mount_calls.frame(answer))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def begin(self) -> None:
        """Another call."""
        self._done_bytes = 0

    def beat(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        if time.monotonic() - self._told_at >= BEAT_S:
            self._tell(0.0)

    def pause(self, size_bytes: int) -> None:
        self._tell(size_bytes / SLOWEST_BYTES_PER_S)

    def _tell(self, pause_s: float) -> None:
        self._told_at = time.monotonic()
        self.say(Alive(done_bytes=self._done_bytes, pause_s=pause_s))


class RunFolder:
    """Performs the calls on one run's folder."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._unwatch = Event()
        self._copying: Sliced[checkpoints.PublishedCheckpoint] | None = None
        self._copied_step = -1

    def answer(self, request: Request) -> None:
        self._speaker.begin()
        answer: Answer
        try:
            answer = mount_calls.result(request.number, self._perform(request.call))
        except Exception as error:  # whatever it is, the agent has to hear of it
            answer = mount_calls.failure_of(request.number, error)
            if answer.kind == "bug":
                log.exception("mount_worker.bug", call=type(request.call).__name__)
        self._speaker.say(answer)

    def _perform(self, call: Call) -> object:
        if isinstance(call, Open):
            return self._open(call)
        self._mount.check()  # an unmounted bucket looks like an empty folder
        match call:
            case ListRuns():
                return bucket.list_runs(self._run_dir.parent)
            case ListAttempts():
                return bucket.list_attempts(self._run_dir, listing=self._listing)
            case ListCommits(attempt=attempt, after_version=version, whole=whole):
                return bucket.list_commits(
                    self._run_dir, attempt, version, whole=whole, listing=self._listing
                )
            case ListVersions():
                return retention.list_versions(self._listing)
            case ListTorn():
                return retention.list_torn(self._listing)
            case Prune(attempt=attempt, version=version):
                return retention.prune(self._listing, attempt, version)
            case ReadCommit(key=key, run=run, public_key=public_key):
                return bucket.read_commit(self._run_dir, key, run=run, public_key=public_key)
            case ListResults():
                return bucket.list_results(self._listing)
            case ReadResult(key=key, run=run, public_key=public_key):
                return bucket.read_commit(
                    self._run_dir, key, run=run, public_key=public_key, shelf=RESULTS
                )
            case Stage():
                return self._stage(call)
            case Publish():
                return self._publish(call)
            case ListCheckpoints():
                return checkpoints.list_checkpoints(self._listing)
            case ListTornCheckpoints():
                return checkpoints.list_torn_checkpoints(self._listing)
            case ReadCheckpoint(key=checkpoint_key, run=run, public_key=public):
                return checkpoints.read_checkpoint(
                    self._run_dir, checkpoint_key, run=run, public_key=public
                )
            case PublishCheckpoint():
                return self._publish_checkpoint(call)
            case ContinueCheckpoint():
                return self._continue_checkpoint(call)
            case RestoreCheckpoint():
                self._restore_checkpoint(call)
                return None
            case PruneCheckpoint(key=checkpoint_key):
                return checkpoints.prune_checkpoint(self._listing, checkpoint_key)
            case WriteSegment(attempt=attempt, number=number, data=data):
                return segments.write_segment(
                    *(self._listing, attempt, number, data),
                    mount=self._mount,
                    heartbeat=self._speaker,
                )
            case ListSegments(run=run):
                return segments.list_segments(self._listing_of(run))
            case ReadSegments(keys=keys, run=run):
                return segments.read_segments(self._listing_of(run), keys, self._speaker)
            case ListRecordedRuns():
                return segments.list_recorded_runs(self._listing)
            case Watch():
                self._watch(call)
                return None

    def _open(self, call: Open) -> KnownMount:
        logs.set_up(as_json=call.log_json, level=call.log_level)
        self._run_dir = call.run_dir
        self._listing = Listing(call.run_dir, self._speaker)
        self._mount = MountWatch(call.run_dir.parent, call.known)
        return self._mount.known

    def _listing_of(self, run: str) -> Listing:
        """That of another run, of which little is asked; "" is this one."""
        if not run:
            return self._listing
        if not is_run_name(run):
            raise ValueError(f"{run!r} is no name of a run")
        return Listing(self._run_dir.parent / run, self._speaker)

    def _stage(self, call: Stage) -> staging.StagedAdapter:
        return staging.stage(
            self._run_dir,
            call.commit,
            call.staging_dir,
            max_rank=call.max_rank,
            listing=self._listing,
            heartbeat=self._speaker,
        )

    def _publish(self, call: Publish) -> bucket.PublishedAdapter:
        return bucket.publish(
            call.local_dir,
            self._run_dir,
            run=call.run,
            attempt=call.attempt,
            version=call.version,
            base_model=call.base_model,
            base_model_digest=call.base_model_digest,
            private_key=call.private_key,
            live=call.live,
            now_unix_s=call.now_unix_s,
            max_rank=call.max_rank,
            shelf=RESULTS if call.is_result else VERSIONS,
            mount=self._mount,
            heartbeat=self._speaker,
        )

    def _publish_checkpoint(self, call: PublishCheckpoint) -> CheckpointProgress:
        if self._copying is not None:
            self._copying.close()
        steps = checkpoints.publishing(
            call.saved, self._run_dir, mount=self._mount, heartbeat=self._speaker
        )
        self._copying, self._copied_step = Sliced(steps), call.saved.step
        return CheckpointProgress(self._copying.advance(call.slice_s))

    def _continue_checkpoint(self, call: ContinueCheckpoint) -> CheckpointProgress:
        if self._copying is None or self._copied_step != call.step:
            raise BucketUnavailableError(
                f"the copy of step {call.step} was lost with its worker",
                where=str(self._run_dir),
                fix="It is begun again",
            )
        return CheckpointProgress(self._copying.advance(call.slice_s))

    def _restore_checkpoint(self, call: RestoreCheckpoint) -> None:
        checkpoints.restore(
            self._run_dir,
            call.checkpoint,
            call.target_dir,
            listing=self._listing,
            heartbeat=self._speaker,
        )

    def _watch(self, call: Watch) -> None:
        """In a thread, in place of the one before, which may still need a moment to end."""
        from asyncgrpo_agent.store.watch import watch_commits  # a trainer never needs it

        self._unwatch.set()
        self._unwatch = Event()

        def folders() -> Sequence[Path]:
            self._mount.check()
            return bucket.commit_folders(self._run_dir, call.attempt)

        Thread(
            target=watch_commits,
            args=(folders,),
            kwargs={
                "changed": lambda: self._speaker.say(Changed()),
                "stop": self._unwatch,
            },
            daemon=True,
        ).start()
