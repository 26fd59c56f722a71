"""What is open on one mount of `fakes.strict_mount_fs`."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path


class State(Enum):
    UNOPENED = auto()
    WRITING = auto()
    DONE = auto()
    DEAD = auto()


@dataclass(slots=True)
class Upload:
    """A file that this mount writes, or has spoiled. `opener` is the process that opened it."""

    key: str
    opener: int = 0
    descriptor: int = -1
    path: Path = Path()
    size_bytes: int = 0
    state: State = State.UNOPENED
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def at_its_cost(self) -> Iterator[None]:
        """An error ends an upload that was not complete. Its name stays blocked on this mount."""
        try:
            yield
        except OSError:
            with self.lock:
                if self.state is State.WRITING:
                    self.state, self.size_bytes = State.DEAD, 0
                    self.path.unlink()
            raise


@dataclass(slots=True)
class Reader:
    key: str
    etag: tuple[int, int]
    descriptor: int
    next_offset: int | None = None
    broken: int = 0
    """The errno of all that follows. The kernel asks again for what it only read ahead."""

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """What goes wrong once is wrong for good."""
        try:
            yield
        except OSError as error:
            self.broken = error.errno or errno.EIO
            raise
