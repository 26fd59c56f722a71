"""The bucket: publish an adapter, list commits, read one. Blocking calls for the mount's worker.

Written for the narrowest file system it can be, Mountpoint for Amazon S3: new names only, one
sequential write each, fsync and close both checked. Nothing is ever renamed, overwritten, appended
to, locked, linked, mapped or given a mode here. A name whose write failed is dead; the retry takes
a new one. The commit is written last, so what was cut short does not exist.

Reading goes by listing alone: no path is opened that a listing has not shown, because one early
look can make a mount blind to a file for its whole negative-cache time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent.core import finals
from asyncgrpo_agent.core.adapters import (
    COMMITS_PER_FOLDER,
    AdapterId,
    Attempt,
    is_attempt,
    is_run_name,
    parse_attempt,
    parse_commit_key,
)
from asyncgrpo_agent.core.commits import (
    MAX_COMMIT_BYTES,
    VERSIONS,
    Commit,
    CommitFile,
    Shelf,
    decode,
    encode,
    is_sealed,
)
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat
from asyncgrpo_agent.store.inspection import InspectedFile, inspect_files, inspect_lora
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import MountWatch, list_names, unavailable
from asyncgrpo_agent.store.objects import ObjectWriter, Steps, check_same, finished, retried

_LIVE_FOLDERS: Final = 2  # the live window may straddle a border
_FOLDER_RE: Final = re.compile(r"\d{6}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """An adapter that exists. `phases_s` holds seconds by phase: check, copy, commit."""

    adapter: AdapterId
    commit_key: str
    folder: str  # of its files, a key as the commit's
    sealed: bytes  # the commit as it was written
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
    shelf: Shelf = VERSIONS,
    mount: MountWatch | None = None,
    heartbeat: Heartbeat = SILENT,
) -> PublishedAdapter:
    """Check, copy, commit. AdapterRefusedError: never started; BucketUnavailableError: no commit.

    One publisher a run and attempt; `mount` is the watch that the caller made at its start. Of a
    result `version` is the step.
    """
    if not is_attempt(attempt):
        raise ValueError(f"{attempt!r} is not an attempt")
    began = time.perf_counter()
    files = inspect_files(local_dir, heartbeat)
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
        return commit, encode(commit, private_key, shelf=shelf)

    sealed(shelf.folder(attempt, version, 0))  # refused before a byte is written
    watch = mount or MountWatch(bucket_run_dir.parent)
    mounted = watch.found()
    watch.check_alive(writable=True)
    checked = time.perf_counter()
    writer = ObjectWriter(bucket_run_dir, heartbeat)

    def copy(retry: int) -> Steps[str]:
        folder = shelf.folder(attempt, version, retry)
        for file in files:
            yield from writer.copy(local_dir / file.name, f"{folder}/{file.name}", file.sha256)
        return folder

    folder = finished(retried(copy))
    copied = time.perf_counter()
    commit, data = sealed(folder)
    key = finished(retried(lambda retry: writer.write(shelf.key(attempt, version, retry), [data])))
    check_same(mounted, watch)
    committed = time.perf_counter()
    return PublishedAdapter(
        adapter=commit.adapter,
        commit_key=key,
        folder=folder,
        sealed=data,
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


# --- listing and reading ---------------------------------------------------------------------


def list_runs(bucket: Path) -> list[str]:
    """The runs that have published anything, by name."""
    names = sorted(name for name in list_names(bucket) if is_run_name(name))
    return [name for name in names if "commits" in Listing(bucket / name).names("")]


def list_attempts(bucket_run_dir: Path, *, listing: Listing | None = None) -> list[Attempt]:
    """All attempts that left anything in the bucket, oldest first."""
    listing = listing or Listing(bucket_run_dir)
    names = listing.names("commits") | listing.names("adapters")
    return sorted(parse_attempt(name) for name in names if is_attempt(name))


def list_commits(
    bucket_run_dir: Path,
    attempt: str,
    after_version: int,
    *,
    whole: bool = False,
    listing: Listing | None = None,
) -> list[str]:
    """Keys of commits above `after_version`, newest first; of a long absence only the last ones,
    unless the `whole` is asked for."""
    listing = listing or Listing(bucket_run_dir)
    found = []
    folders = _commit_folders(listing, attempt, after_version)
    for folder in folders if whole else folders[:_LIVE_FOLDERS]:
        for name in listing.names(folder):
            key = f"{folder}/{name}"
            parts = parse_commit_key(key)
            if parts is not None and parts.version > after_version:
                found.append((parts.version, parts.retry, key))
    return [key for _, _, key in sorted(found, reverse=True)]


def list_results(listing: Listing) -> list[str]:
    """Keys of the commits of a run's results, newest first."""
    return finals.newest_first(
        f"{finals.FOLDER}/{attempt}/{name}"
        for attempt in listing.names(finals.FOLDER)
        if is_attempt(attempt)
        for name in listing.names(f"{finals.FOLDER}/{attempt}")
    )


def commit_folders(
    bucket_run_dir: Path, attempt: str | None, *, listing: Listing | None = None
) -> list[Path]:
    """Where the next commit will show: the newest commits folder, and the parent that shows a
    newer one; before there is any, the nearest folder that exists."""
    listing = listing or Listing(bucket_run_dir)
    if attempt is not None:
        newest = _commit_folders(listing, attempt, -1)
        if newest:
            return [bucket_run_dir / newest[0], bucket_run_dir / "commits" / attempt]
        if attempt in listing.names("commits"):
            return [bucket_run_dir / "commits" / attempt]
    if "commits" in listing.names(""):
        return [bucket_run_dir / "commits"]
    is_there = bucket_run_dir.name in list_names(bucket_run_dir.parent)
    return [bucket_run_dir if is_there else bucket_run_dir.parent]


def _commit_folders(listing: Listing, attempt: str, after_version: int) -> list[str]:
    """Newest first."""
    parent = f"commits/{attempt}"
    first = (after_version + 1) // COMMITS_PER_FOLDER
    names = [n for n in listing.names(parent) if _FOLDER_RE.fullmatch(n) and int(n) >= first]
    return [f"{parent}/{name}" for name in sorted(names, reverse=True)]


def read_commit(
    bucket_run_dir: Path,
    key: str,
    *,
    run: str,
    public_key: bytes | None,
    shelf: Shelf = VERSIONS,
) -> ListedCommit:
    """The verified commit at a key that a listing has shown; without a key, but for its signature.

    AdapterRefusedError: it will never be one. BucketUnavailableError: look again later.
    """
    path = bucket_run_dir / key
    parts = shelf.parse(key)
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
        commit = decode(data, run=run, public_key=public_key, shelf=shelf)
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
