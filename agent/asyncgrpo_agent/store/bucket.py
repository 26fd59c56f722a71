"""The bucket: publish an adapter, list commits, read one. Plain blocking calls for worker threads.

Written for the narrowest file system it can be, Mountpoint for Amazon S3: new names only, one
sequential write each, fsync and close both checked. Nothing is ever renamed, overwritten, appended
to, locked, linked, mapped or given a mode here. A name whose write failed is dead; the retry takes
a new one. The commit is written last, so what was cut short does not exist.

Reading goes by listing alone: no path is opened that a listing has not shown, because one early
look can make a mount blind to a file for its whole negative-cache time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent.core.adapters import (
    COMMITS_PER_FOLDER,
    AdapterId,
    Attempt,
    adapter_folder,
    commit_key,
    is_attempt,
    parse_attempt,
    parse_commit_key,
)
from asyncgrpo_agent.core.commits import (
    MAX_COMMIT_BYTES,
    MAX_RETRIES,
    Commit,
    CommitFile,
    decode,
    encode,
    is_sealed,
)
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.inspection import InspectedFile, chunks, inspect_files, inspect_lora
from asyncgrpo_agent.store.mounts import DEAD_ERRNOS, MountWatch, list_names, scan, unavailable

log = Log(__name__)

_FOLDER_RE: Final = re.compile(r"\d{6}", re.ASCII)
# Another name cannot help against these.
_HOPELESS: Final = DEAD_ERRNOS | {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """An adapter that exists. `phases_s` holds seconds by phase: check, copy, commit."""

    adapter: AdapterId
    commit_key: str
    total_bytes: int
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCommit:
    """A commit that was read and verified, and its key."""

    key: str
    commit: Commit

    @property
    def adapter(self) -> AdapterId:
        return self.commit.adapter


# --- publishing ------------------------------------------------------------------------------


def publish(
    local_dir: Path,
    bucket_run_dir: Path,
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
    mount: MountWatch | None = None,
) -> PublishedAdapter:
    """Check, copy, commit. AdapterRefusedError: never started; BucketUnavailableError: no commit.

    One publisher a run and attempt; `mount` is the watch that the caller made at its start.
    """
    if not is_attempt(attempt):
        raise ValueError(f"{attempt!r} is not an attempt")
    began = time.perf_counter()
    files = inspect_files(local_dir)
    lora = inspect_lora(local_dir, max_rank=max_rank)

    def sealed(folder: str) -> tuple[Commit, bytes]:
        commit = Commit(
            run=run,
            attempt=attempt,
            version=version,
            base_model=base_model,
            base_model_digest=base_model_digest,
            created_unix_s=now_unix_s,
            live=list(live),
            lora=lora,
            files=[_commit_file(folder, file) for file in files],
        )
        return commit, encode(commit, private_key)

    sealed(adapter_folder(attempt, version))  # refused before a byte is written
    (mount or MountWatch(bucket_run_dir.parent)).check_alive(writable=True)
    checked = time.perf_counter()
    folder = _retried(
        lambda retry: _copy_files(
            local_dir, bucket_run_dir, adapter_folder(attempt, version, retry), files
        )
    )
    copied = time.perf_counter()
    commit, data = sealed(folder)
    key = _retried(
        lambda retry: _write_new(bucket_run_dir, commit_key(attempt, version, retry), [data])
    )
    committed = time.perf_counter()
    return PublishedAdapter(
        adapter=commit.adapter,
        commit_key=key,
        total_bytes=commit.total_bytes,
        phases_s={
            "check": checked - began,
            "copy": copied - checked,
            "commit": committed - copied,
        },
    )


def _commit_file(folder: str, file: InspectedFile) -> CommitFile:
    key = f"{folder}/{file.name}"
    return CommitFile(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, key=key)


def _retried(write: Callable[[int], str]) -> str:
    """The key that was written, under the first name that worked."""
    for retry in range(MAX_RETRIES + 1):
        try:
            return write(retry)
        except OSError as error:
            log.warning("bucket.write_failed", path=error.filename, error=error.strerror)
            if retry == MAX_RETRIES or error.errno in _HOPELESS:
                raise unavailable(error, error.filename or "bucket") from error
    raise AssertionError("the last try returns or raises")


def _copy_files(
    local_dir: Path, bucket_run_dir: Path, folder: str, files: Iterable[InspectedFile]
) -> str:
    for file in files:
        with (local_dir / file.name).open("rb") as source:
            digest = hashlib.sha256()
            _write_new(bucket_run_dir, f"{folder}/{file.name}", _hashed(chunks(source), digest))
        if digest.hexdigest() != file.sha256:
            raise AdapterRefusedError(
                "changed while it was copied",
                where=str(local_dir / file.name),
                fix="Nothing else may write to the trainer's output folder",
            )
    return folder


def _hashed(data: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in data:
        digest.update(chunk)
        yield chunk


def _write_new(bucket_run_dir: Path, key: str, data: Iterable[bytes]) -> str:
    """One new object in one sequential pass. An OSError carries the path it happened at."""
    path = bucket_run_dir / key
    try:
        _make_folder(path.parent, bucket_run_dir)
        file = path.open("xb", buffering=0)
        try:
            for chunk in data:
                _write_all(file, chunk)
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                file.close()
            raise
        file.close()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return key


def _write_all(file: io.FileIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


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


# --- listing and reading ---------------------------------------------------------------------


class Listing:
    """Lists folders below a run's folder, each only after its parent's listing has shown it.

    Keep one for the life of a watch: it remembers what was shown, and saves the parents' listings.
    """

    def __init__(self, bucket_run_dir: Path) -> None:
        self.run_dir = bucket_run_dir
        self._shown: set[Path] = set()

    def names(self, key: str) -> set[str]:
        """The names in a folder; none for one that is not there. BucketUnavailableError."""
        folder = self.run_dir / key
        if not self._is_shown(folder):
            return set()
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
            self._shown.add(folder)
        return folder in self._shown


def list_attempts(bucket_run_dir: Path, *, listing: Listing | None = None) -> list[Attempt]:
    """All attempts that left anything in the bucket, oldest first."""
    listing = listing or Listing(bucket_run_dir)
    names = listing.names("commits") | listing.names("adapters")
    return sorted(parse_attempt(name) for name in names if is_attempt(name))


def list_commits(
    bucket_run_dir: Path, attempt: str, after_version: int, *, listing: Listing | None = None
) -> list[str]:
    """Keys of commits above `after_version`, newest first; of a long absence only the last ones."""
    listing = listing or Listing(bucket_run_dir)
    found = []
    for folder in _newest_folders(listing, attempt, after_version):
        for name in listing.names(folder):
            key = f"{folder}/{name}"
            parts = parse_commit_key(key)
            if parts is not None and parts.version > after_version:
                found.append((parts.version, parts.retry, key))
    return [key for _, _, key in sorted(found, reverse=True)]


def commit_folders(
    bucket_run_dir: Path, attempt: str | None, *, listing: Listing | None = None
) -> list[Path]:
    """Where the next commit will show: the newest commits folder, and the parent that shows a
    newer one; before there is any, the nearest folder that exists."""
    listing = listing or Listing(bucket_run_dir)
    if attempt is not None:
        newest = _newest_folders(listing, attempt, -1)
        if newest:
            return [bucket_run_dir / newest[0], bucket_run_dir / "commits" / attempt]
        if attempt in listing.names("commits"):
            return [bucket_run_dir / "commits" / attempt]
    if "commits" in listing.names(""):
        return [bucket_run_dir / "commits"]
    is_there = bucket_run_dir.name in list_names(bucket_run_dir.parent)
    return [bucket_run_dir if is_there else bucket_run_dir.parent]


def _newest_folders(listing: Listing, attempt: str, after_version: int) -> list[str]:
    """Newest first. Two are enough: the live window may straddle a border."""
    parent = f"commits/{attempt}"
    first = (after_version + 1) // COMMITS_PER_FOLDER
    names = [n for n in listing.names(parent) if _FOLDER_RE.fullmatch(n) and int(n) >= first]
    return [f"{parent}/{name}" for name in sorted(names, reverse=True)[:2]]


def read_commit(bucket_run_dir: Path, key: str, *, run: str, public_key: bytes) -> ListedCommit:
    """The verified commit at a key that a listing has shown.

    AdapterRefusedError: it will never be one. BucketUnavailableError: look again later.
    """
    path = bucket_run_dir / key
    parts = parse_commit_key(key)
    if parts is None:
        raise AdapterRefusedError("is not the key of a commit", where=key, fix="Ignore it")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_COMMIT_BYTES + 1)
    except OSError as error:
        raise unavailable(error, path) from error
    if not is_sealed(data):
        raise BucketUnavailableError(
            "is cut: still being written, or its writer died",
            where=str(path),
            fix="Nothing to do; it does not count until it is whole",
        )
    try:
        commit = decode(data, run=run, public_key=public_key)
    except AdapterRefusedError as error:
        error.where = str(path)
        raise
    if (commit.attempt, commit.version) != (parts.attempt, parts.version):
        raise AdapterRefusedError(
            f"is a copy of the commit of {commit.adapter.name}",
            where=str(path),
            fix="See who else writes to the bucket",
        )
    return ListedCommit(key=key, commit=commit)
