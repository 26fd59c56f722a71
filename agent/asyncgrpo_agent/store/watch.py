"""Wakes the replica when a local folder holds something new. A hint, never the truth.

Runs in a thread of the mount's worker, with watchfiles and inotify. That stays silent on mounts
that other hosts write to, and watchfiles' own polling looks at every single file there, so those
are not watched: the caller lists them by its timer. A watcher misses what happened before it began,
so `changed` is called once more after each start and on each failure, and the caller has a timer
here too. It lists the bucket each time and compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Final

from watchfiles import watch

from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.logs import Log

log = Log(__name__)

LOOK_S: Final = 5.0  # between two looks at what is to be watched, if nothing happens
MIN_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0
_STEP_MS: Final = 20  # changes are handed over after one or two quiet steps
_DEBOUNCE_MS: Final = 200

Folders = Callable[[], Sequence[Path]]


def watch_commits(
    folders: Folders,
    *,
    changed: Callable[[], None],
    stop: Event,
    look_s: float = LOOK_S,
) -> None:
    """Until `stop`: call `changed` when something may have changed below what `folders` gives.

    `folders` names existing folders, nearest to where the next commit will show; it is asked again
    at each wake-up, since a deeper folder may be there now.
    """
    backoff_s = MIN_BACKOFF_S
    while not stop.is_set():
        began = time.monotonic()
        try:
            _watch_once(folders, changed, stop, look_s)
        except (OSError, RuntimeError, BucketUnavailableError) as error:
            # watchfiles reports IO errors of its Rust part as RuntimeError.
            if time.monotonic() - began > MAX_BACKOFF_S:
                backoff_s = MIN_BACKOFF_S
            log.warning("watch.failed", error=error, retry_in_s=backoff_s)
            changed()
            stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def _watch_once(folders: Folders, changed: Callable[[], None], stop: Event, look_s: float) -> None:
    """Watch until the folders to watch are others. Raises what the watcher raised."""
    watched = _look(folders)
    paths = [path for path, _ in watched]
    log.debug("watch.started", folder=paths[0])
    for changes in watch(
        *paths,
        watch_filter=None,
        debounce=_DEBOUNCE_MS,
        step=_STEP_MS,
        stop_event=_Started(changed, stop),
        rust_timeout=round(1000 * look_s),
        yield_on_timeout=True,
        raise_interrupt=False,
        force_polling=False,
        recursive=False,
    ):
        if changes:
            changed()
        if _look(folders) != watched:
            changed()
            return


def _look(folders: Folders) -> list[tuple[Path, int]]:
    """What to watch. A folder that was replaced has another inode, which inotify follows."""
    return [(path, path.stat().st_ino) for path in folders()]


class _Started:
    """What watchfiles asks in every step whether to stop: the first time, it has begun to watch."""

    def __init__(self, changed: Callable[[], None], stop: Event) -> None:
        self._changed = changed
        self._stop = stop
        self._is_new = True

    def is_set(self) -> bool:
        if self._is_new:
            self._is_new = False
            self._changed()
        return self._stop.is_set()
