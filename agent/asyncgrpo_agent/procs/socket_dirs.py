"""Folders for sockets: private, with a short path, and none left behind by those who were killed.

Each is held by a lock of the kernel's for as long as its process lives. Whoever makes one removes
those beside it that nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "agrpo."
MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of unix(7), without its final zero
YOUNG_S: Final = 60.0  # one that was made so lately may be about to be held


@contextmanager
def socket_dir() -> Iterator[Path]:
    """A private folder (0700) for sockets, removed afterwards; its path is short enough."""
    roots = [os.environ.get(name, "") for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")]
    usable = [root for root in roots if root and _fits(root) and os.access(root, os.W_OK)]
    root = usable[0] if usable else "/tmp"  # noqa: S108 - a $TMPDIR may be too long a path
    _remove_abandoned(Path(root))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _fits(root: str) -> bool:
    return len(os.fsencode(root)) + len(f"/{PREFIX}12345678/vllm.sock") <= MAX_SOCKET_PATH_BYTES


def _remove_abandoned(root: Path) -> None:
    """Of this user's only. What cannot be looked at stays."""
    for folder in root.glob(f"{PREFIX}????????"):
        with suppress(OSError):
            found = folder.lstat()
            is_old = time.time() - found.st_mtime > YOUNG_S  # noqa: TID251 - as file systems do
            if found.st_uid == os.getuid() and is_old:
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    """Raises OSError if it is held, or is no folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
