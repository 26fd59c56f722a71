"""A local folder as S3 bucket, shared by any number of `fakes.strict_mount_fs` processes.

One file is one object. It appears whole, by one rename, at the moment its modification time names,
which may lie ahead: until then only the mount that put it knows it. A folder exists as long as an
object is below it; empty folders of the local disk mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a lookup finds: an object, or a folder above one."""

    is_folder: bool
    size_bytes: int = 0
    modified_s: int = 0  # S3 answers in whole seconds
    etag: tuple[int, int] = (0, 0)


FOLDER = Entry(is_folder=True)


class Objects:
    """The bucket as one mount sees it; `own` are the keys that it has put itself."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "objects"
        self._uploads = folder / "uploads"
        self.own: set[str] = set()
        for part in (self._objects, self._uploads):
            part.mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> Entry | None:
        try:
            status = (self._objects / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if S_ISDIR(status.st_mode):
            return FOLDER if self._has_any(key) else None
        if status.st_mtime_ns > time.time_ns() and key not in self.own:
            return None
        return Entry(
            is_folder=False,
            size_bytes=status.st_size,
            modified_s=status.st_mtime_ns // NANOSECONDS,
            etag=(status.st_ino, status.st_mtime_ns),
        )

    def below(self, key: str) -> dict[str, Entry]:
        """What a listing of a folder shows, sorted; nothing for a folder that is not there."""
        children = {name: self.find(_join(key, name)) for name in sorted(self._names(key))}
        return {name: entry for name, entry in children.items() if entry is not None}

    def keys(self) -> list[str]:
        return sorted(self._walk(""))

    def open(self, key: str) -> int:
        return os.open(self._objects / key, os.O_RDONLY)

    def new_upload(self) -> tuple[int, Path]:
        descriptor, path = tempfile.mkstemp(dir=self._uploads)
        return descriptor, Path(path)

    def put(self, upload: Path, key: str, *, visible_after_s: float) -> None:
        """The upload becomes the object, replacing an older one."""
        visible_ns = time.time_ns() + round(visible_after_s * NANOSECONDS)
        os.utime(upload, ns=(visible_ns, visible_ns))
        self.own.add(key)
        target = self._objects / key
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                upload.replace(target)
            except FileNotFoundError:  # another host has deleted the last object beside it
                continue
            return

    def delete(self, key: str) -> None:
        path = self._objects / key
        path.unlink()
        with contextlib.suppress(OSError):  # the first that still holds something
            for folder in path.relative_to(self._objects).parents[:-1]:
                (self._objects / folder).rmdir()

    def clear(self) -> None:
        shutil.rmtree(self._objects)
        self._objects.mkdir()

    def _names(self, key: str) -> list[str]:
        try:
            return os.listdir(self._objects / key)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _has_any(self, key: str) -> bool:
        return next(self._walk(key), None) is not None

    def _walk(self, key: str) -> Iterator[str]:
        for name in self._names(key):
            child = _join(key, name)
            if (self._objects / child).is_dir():
                yield from self._walk(child)
            elif self.find(child) is not None:
                yield child


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
