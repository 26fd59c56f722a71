"""Objects of the bucket, whole: written new in one pass, read back with a check, removed.

Only new names are ever written, each in one sequential pass, with fsync and close both checked. A
name whose write failed is dead; `retried` goes on to the next. Readers ask the listing first, and
keep nothing whose size or sha256 is not what was promised.

Writing comes in steps, at most a chunk each, so that a long copy can let shorter calls go first;
`finished` takes all of them at once. Blocking calls for the mount's worker.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Final, Generic, TypeVar

from asyncgrpo_agent.core.adapters import MAX_RETRIES
from asyncgrpo_agent.errors import (
    AdapterDamagedError,
    AdapterRefusedError,
    BucketUnavailableError,
    DeletionForbiddenError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.heartbeat import Heartbeat
from asyncgrpo_agent.store.inspection import chunks
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import DEAD_ERRNOS, Mount, MountWatch, unavailable

log = Log(__name__)

MAX_FAILURES: Final = 4  # of one publication; names that earlier ones have spoilt do not count
RETRY_WAITS_S: Final = (0.1, 0.4, 1.0)  # between the tries to read a file that a commit names
# Another name cannot help against these.
_HOPELESS: Final = DEAD_ERRNOS | {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES}
_FORBIDDEN: Final = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})

T = TypeVar("T")
Steps = Generator[None, None, T]


def finished(steps: Steps[T]) -> T:
    """Take all steps; what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class NameTakenError(OSError):
    """An object has this name, or one that failed to become one has spoilt it."""


class Sliced(Generic[T]):
    """A long job, done a slice at a time. Whoever lost an answer may ask again."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._result: T | None = None
        self._error: Exception | None = None

    def advance(self, seconds: float) -> T | None:
        """Its result, or None while it goes on; for about so long, and one step at least."""
        until = time.monotonic() + seconds
        while self._result is None:
            if self._error is not None:
                raise self._error
            try:
                next(self._steps)
            except StopIteration as stop:
                self._result = stop.value
            except Exception as error:
                self._error = error
                raise
            if time.monotonic() >= until:
                break
        return self._result

    def close(self) -> None:
        """Whatever it had opened is closed."""
        self._steps.close()


def retried(write: Callable[[int], Steps[str]]) -> Steps[str]:
    """The key that was written, under the first name that worked."""
    failures = 0
    for retry in range(MAX_RETRIES + 1):
        try:
            return (yield from write(retry))
        except OSError as error:
            is_taken = isinstance(error, NameTakenError)
            level = log.info if is_taken else log.warning
            level("bucket.write_failed", path=error.filename, error=error.strerror)
            failures += not is_taken
            if failures == MAX_FAILURES or retry == MAX_RETRIES or error.errno in _HOPELESS:
                raise unavailable(error, error.filename or "bucket") from error
    raise AssertionError("the last try returns or raises")


def check_same(mounted: Mount | None, watch: MountWatch) -> None:
    """Between two mounts the bare folder takes everything, and the next one hides it."""
    if watch.check() != mounted:
        raise BucketUnavailableError(
            "was mounted anew while it was written to, and a part may lie beneath it",
            where=str(watch.path),
            fix="Write it again",
        )


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectWriter:
    """Writes new objects below a run's folder. An OSError carries the path that it happened at."""

    run_dir: Path
    heartbeat: Heartbeat

    def copy(self, source: Path, key: str, sha256: str) -> Steps[str]:
        """One local file, which has to be what it was when it was inspected."""
        digest = hashlib.sha256()
        with contextlib.closing(_hashed(source, digest, self.heartbeat)) as data:
            yield from self.write(key, data)
        if digest.hexdigest() != sha256:
            raise changed(source)
        return key

    def write(self, key: str, data: Iterable[bytes]) -> Steps[str]:
        """One new object in one sequential pass."""
        path, size_bytes = self.run_dir / key, 0
        try:
            _make_folder(path.parent, self.run_dir)
            file = _open_new(path)
            try:
                for chunk in data:
                    size_bytes += _write_all(file, chunk)
                    yield
                self.heartbeat.pause(size_bytes)  # s3fs uploads the file here, others in close
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    file.close()
                raise
            self.heartbeat.pause(size_bytes)
            file.close()
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        return key


def changed(source: Path) -> AdapterRefusedError:
    """What is to be published must stand still."""
    return AdapterRefusedError(
        "changed while it was copied",
        where=str(source),
        fix="Nothing else may write to the trainer's output folder",
    )


def _hashed(
    source: Path, digest: hashlib._Hash, heartbeat: Heartbeat
) -> Generator[bytes, None, None]:
    try:
        file = source.open("rb")
    except FileNotFoundError as error:
        raise changed(source) from error
    with file:
        for chunk in chunks(file, heartbeat):
            digest.update(chunk)
            yield chunk


def _open_new(path: Path) -> io.FileIO:
    try:
        return path.open("xb", buffering=0)
    except (FileExistsError, PermissionError) as error:
        if error.errno == errno.EACCES:
            raise
        raise NameTakenError(error.errno, error.strerror, str(path)) from error


def _write_all(file: io.FileIO, chunk: bytes) -> int:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]
    return len(chunk)


def _make_folder(folder: Path, bucket_run_dir: Path) -> None:
    """One call where the folders exist, which is nearly always; upwards to the run's at most."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        if folder == bucket_run_dir:
            raise
        _make_folder(folder.parent, bucket_run_dir)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()


# --- reading ---------------------------------------------------------------------------------


class UnreadableError(Exception):
    """An object could not be read, as opposed to written on local disk; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def wait(seconds: float) -> None:
    """What readers do between their tries; tests replace it."""
    Event().wait(seconds)


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """Copies objects onto local disk. One may come late, or go while it is read."""

    run_dir: Path
    listing: Listing
    heartbeat: Heartbeat
    wait: Callable[[float], object] = wait
    _shown: set[str] = field(default_factory=set)  # keys that a listing has shown

    def copy(self, key: str, target: Path, *, size_bytes: int, sha256: str) -> None:
        """AdapterDamagedError: it is another; UnreadableError: it cannot be read, now or ever."""
        waits_s = iter(RETRY_WAITS_S)
        while True:
            try:
                return self._copy(key, target, size_bytes, sha256)
            except UnreadableError as failed:
                wait_s = next(waits_s, None)
                if wait_s is None or failed.error.errno in DEAD_ERRNOS:
                    raise
                log.info("bucket.read_again", key=key, error=failed.error.strerror)
                self.heartbeat.beat(0)  # an error is an answer
                self.wait(wait_s)
                self._shown.clear()

    def _copy(self, key: str, target: Path, size_bytes: int, sha256: str) -> None:
        source = self.run_dir / key
        if key not in self._shown:  # each listing costs a request, and shows all of an adapter
            folder = key.rpartition("/")[0]
            self._shown.update(f"{folder}/{name}" for name in self.listing.names(folder))
        if key not in self._shown:
            raise UnreadableError(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        found_bytes, found_sha256 = self._copy_hashed(source, target, size_bytes)
        if found_bytes != size_bytes:
            raise _corrupt(source, f"does not have the {size_bytes} bytes of its commit")
        if found_sha256 != sha256:
            raise _corrupt(source, "does not have the sha256 of its commit")

    def _copy_hashed(self, source: Path, target: Path, limit_bytes: int) -> tuple[int, str]:
        """Size and sha256 of the copy, which stops once it is larger than the limit."""
        digest = hashlib.sha256()
        size_bytes = 0
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as sink:
            for chunk in self._read(source):
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    break
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            self.heartbeat.pause(size_bytes)
            os.fsync(sink.fileno())
        return size_bytes, digest.hexdigest()

    def _read(self, source: Path) -> Iterator[bytes]:
        try:
            with source.open("rb", buffering=0) as file:
                yield from chunks(file, self.heartbeat)
        except OSError as error:
            raise UnreadableError(error) from error


def _corrupt(path: Path, what: str) -> AdapterDamagedError:
    return AdapterDamagedError(what, where=str(path), fix="See who else writes to the bucket")


def sync_folder(folder: Path) -> None:
    """Of the local disk: its names are durable after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- removing --------------------------------------------------------------------------------


def remove(listing: Listing, key: str) -> int:
    """The number of objects removed, 0 or 1. DeletionForbiddenError, BucketUnavailableError."""
    path: Path = listing.run_dir / key
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise _forbidden(error, path) from error
        raise unavailable(error, path) from error
    return 1


def remove_if_empty(listing: Listing, folder: str) -> None:
    """On a plain folder; a mount has dropped a folder with its last object."""
    with contextlib.suppress(OSError):
        (listing.run_dir / folder).rmdir()


def _forbidden(error: OSError, path: Path) -> DeletionForbiddenError:
    return DeletionForbiddenError(
        f"objects cannot be removed: {error.strerror}",
        where=str(path),
        fix="Mount the trainer's bucket with --allow-delete, with credentials that may delete, "
        "or set bucket.prune = false",
    )
