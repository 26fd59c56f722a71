"""Listing a run's folder without ever asking for what may not be there.

One early look at a path can make a mount blind to it for its whole negative-cache time, so a folder
is listed only once its parent's listing has shown it. Blocking calls for the mount's worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat
from asyncgrpo_agent.store.mounts import list_names, scan, unavailable

MAX_SHOWN: Final = 4096


class Listing:
    """Lists folders below a run's folder, each only after its parent's listing has shown it.

    Keep one for the life of a watch: it remembers what was shown, and saves the parents' listings.
    What it has forgotten, because a long run shows ever new folders, costs those listings again.
    """

    def __init__(self, bucket_run_dir: Path, heartbeat: Heartbeat = SILENT) -> None:
        self.run_dir = bucket_run_dir
        self._heartbeat = heartbeat
        self._shown: set[Path] = set()

    def names(self, key: str) -> set[str]:
        """The names in a folder; none for one that is not there. BucketUnavailableError."""
        folder = self.run_dir / key
        if not self._is_shown(folder):
            return set()
        self._heartbeat.beat(0)
        try:
            return scan(folder)
        except (FileNotFoundError, NotADirectoryError):
            self._shown.discard(folder)  # a mount drops a folder with its last object
            return set()
        except OSError as error:
            raise unavailable(error, folder) from error

    def _is_shown(self, folder: Path) -> bool:
        if folder in self._shown:
            return True
        if folder == self.run_dir:
            siblings = list_names(folder.parent)
        else:
            siblings = self.names(folder.parent.relative_to(self.run_dir).as_posix())
        if folder.name in siblings:
            if len(self._shown) >= MAX_SHOWN:
                self._shown.clear()
            self._shown.add(folder)
        return folder in self._shown
