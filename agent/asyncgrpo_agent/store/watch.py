"""Wakes the replica when the bucket may hold something new. A hint, never the truth.

watchfiles runs in a worker thread, because setting up a poll already reads the folder and a hung
mount would stop the whole loop. On local disks it uses inotify; on mounts that other hosts write
to, where inotify stays silent, it polls the newest commits folder only. Its polling ends at one IO
error, reports deletions that were none, and misses what happened before it began: so `changed` is
called once more after each start, on each failure, and on a timer that depends on nothing. The
caller lists the bucket each time and compares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import trio
from watchfiles import watch

from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.logs import Log

log = Log(__name__)

TIMER_S: Final = 5.0
MIN_POLL_S: Final = 1.0  # each poll of a bucket costs requests
MAX_BACKOFF_S: Final = 30.0
_STEP_MS: Final = 20  # changes are handed over after one or two quiet steps
_DEBOUNCE_MS: Final = 200

Folders = Callable[[], Sequence[Path]]  # lists; runs in a worker thread


async def watch_commits(
    folders: Folders,
    *,
    remote: bool,
    poll_s: float,
    changed: Callable[[], None],
    timer_s: float = TIMER_S,
) -> NoReturn:
    """For ever: call `changed` when something may have changed below what `folders` gives.

    `folders` names existing folders, nearest to where the next commit will show; it is asked again
    at each wake-up, since a deeper folder may be there now.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tick, changed, timer_s)
        backoff_s = MIN_POLL_S
        while True:
            began = trio.current_time()
            try:
                await _watch_once(folders, remote, max(poll_s, MIN_POLL_S), changed, timer_s)
            except (OSError, RuntimeError, BucketUnavailableError) as error:
                # watchfiles reports IO errors of its Rust part as RuntimeError.
                if trio.current_time() - began > MAX_BACKOFF_S:
                    backoff_s = MIN_POLL_S
                log.warning("watch.failed", error=error, retry_in_s=backoff_s)
                changed()
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    raise AssertionError("the loop above has no end")


async def _tick(changed: Callable[[], None], timer_s: float) -> None:
    while True:
        await trio.sleep(timer_s)
        changed()


async def _watch_once(
    folders: Folders, remote: bool, poll_s: float, changed: Callable[[], None], timer_s: float
) -> None:
    """Watch until the folders to watch are others. Raises what the watcher raised."""
    watched = await trio.to_thread.run_sync(_look, folders, remote, abandon_on_cancel=True)
    paths = [path for path, _ in watched]
    watching = _Watching(trio.lowlevel.current_trio_token())
    log.debug("watch.started", folder=paths[0], polling=remote)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watching.run, paths, remote, poll_s)
        try:
            while True:
                with trio.move_on_after(timer_s):
                    await watching.woken()
                    changed()
                watching.check()
                now = await trio.to_thread.run_sync(_look, folders, remote, abandon_on_cancel=True)
                if now != watched:
                    changed()
                    return
        finally:
            watching.stop()
            nursery.cancel_scope.cancel()


def _look(folders: Folders, remote: bool) -> list[tuple[Path, int]]:
    """What to watch. A local folder that was replaced has another inode, which inotify follows;
    on mounts inodes say nothing, and polling goes by the path."""
    if remote:
        return [(path, 0) for path in folders()[:1]]
    return [(path, path.stat().st_ino) for path in folders()]


class _Watching:
    """One watcher in its thread. Its wake-ups are collected in an event of the loop."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._event = trio.Event()
        self._error: Exception | None = None
        self._started = False
        self._stopped = False

    async def run(self, paths: Sequence[Path], remote: bool, poll_s: float) -> None:
        await trio.to_thread.run_sync(self._run, paths, remote, poll_s, abandon_on_cancel=True)

    async def woken(self) -> None:
        await self._event.wait()
        self._event = trio.Event()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped = True

    def is_set(self) -> bool:
        """What watchfiles asks of its stop event in every step: the first time, it watches."""
        if not self._started:
            self._started = True
            self._wake()
        return self._stopped

    def _run(self, paths: Sequence[Path], remote: bool, poll_s: float) -> None:
        try:
            for _ in watch(
                *paths,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                stop_event=self,
                raise_interrupt=False,
                force_polling=remote,
                poll_delay_ms=round(1000 * poll_s),
                recursive=False,
            ):
                self._wake()
        except (OSError, RuntimeError) as error:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._set)

    def _set(self) -> None:
        self._event.set()
