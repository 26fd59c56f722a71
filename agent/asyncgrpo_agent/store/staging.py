"""Verified copies of adapters on local disk, one folder a digest, which vLLM loads by path.

A folder named by a digest is complete and verified: files are streamed into a temporary folder
while they are hashed, checked, synced, and renamed as a whole. A crash leaves temporary folders
only, which `clean` removes at the next start. Nothing but this agent may write here. Plain
blocking calls for worker threads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from asyncgrpo_agent.core.adapters import commit_key
from asyncgrpo_agent.core.commits import Commit, CommitFile
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.bucket import Listing, list_commits
from asyncgrpo_agent.store.inspection import chunks, inspect_files, inspect_lora
from asyncgrpo_agent.store.mounts import DEAD_ERRNOS, unavailable

log = Log(__name__)

RETRY_WAITS_S: Final = (0.1, 0.4, 1.0)  # between the tries to read a file that a commit names
_TEMPORARY: Final = ".tmp-"
_DIGEST_RE: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedAdapter:
    """An adapter that vLLM may load from `path`. `phases_s` holds seconds: read, check, sync."""

    path: Path
    digest: str
    total_bytes: int
    phases_s: dict[str, float]


def clean(staging_dir: Path) -> set[str]:
    """At start: remove what a crash left behind. The result is the digests that are staged."""
    staging_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in staging_dir.iterdir():
        if entry.name.startswith(_TEMPORARY):
            shutil.rmtree(entry, ignore_errors=True)
    return staged(staging_dir)


def staged(staging_dir: Path) -> set[str]:
    """The digests that are staged now."""
    return {entry.name for entry in staging_dir.iterdir() if _DIGEST_RE.fullmatch(entry.name)}


def remove(staging_dir: Path, digest: str) -> None:
    """Forget a staged adapter; fine if it is not there. Never leaves half of it under its name."""
    if _DIGEST_RE.fullmatch(digest) is None:
        raise ValueError(f"{digest!r} is not a digest")
    doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=staging_dir))
    try:
        (staging_dir / digest).rename(doomed)
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(doomed, ignore_errors=True)


def stage(
    bucket_run_dir: Path,
    commit: Commit,
    staging_dir: Path,
    *,
    max_rank: int,
    listing: Listing | None = None,
    wait: Callable[[float], object] | None = None,
) -> StagedAdapter:
    """Copy, verify, and name by digest. What is staged already is verified again and reused.

    AdapterRefusedError: corrupt, unfit for vLLM, or pruned. BucketUnavailableError: try later.
    StoreError: the local disk failed. `wait` sleeps between tries; tests replace it.
    """
    reader = _Reader(bucket_run_dir, commit, listing or Listing(bucket_run_dir), wait or _wait)
    try:
        return _reuse(commit, staging_dir, max_rank) or _stage(
            reader, commit, staging_dir, max_rank
        )
    except OSError as error:
        raise StoreError(
            f"cannot stage an adapter: {error.strerror}",
            where=str(staging_dir),
            fix="Check free space and permissions of the agent's state folder",
        ) from error


def _wait(seconds: float) -> None:
    Event().wait(seconds)


def _reuse(commit: Commit, staging_dir: Path, max_rank: int) -> StagedAdapter | None:
    """What an earlier round or an earlier process has staged, if it is still sound."""
    began = time.perf_counter()
    target = staging_dir / commit.adapter.digest
    if not target.is_dir():
        return None
    if not _is_sound(target, commit):
        log.error("staging.corrupt", path=target)
        remove(staging_dir, target.name)
        return None
    _check(target, commit, max_rank)
    return _staged(target, commit, {"check": time.perf_counter() - began})


def _stage(reader: _Reader, commit: Commit, staging_dir: Path, max_rank: int) -> StagedAdapter:
    began = time.perf_counter()
    target = staging_dir / commit.adapter.digest
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=staging_dir))  # mode 0700
    try:
        for file in commit.files:
            reader.copy(file, temporary / file.name)
        copied = time.perf_counter()
        _check(temporary, commit, max_rank)
        checked = time.perf_counter()
        _sync(temporary)
        temporary.rename(target)
        _sync(staging_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    synced = time.perf_counter()
    phases_s = {"read": copied - began, "check": checked - copied, "sync": synced - checked}
    return _staged(target, commit, phases_s)


def _check(folder: Path, commit: Commit, max_rank: int) -> None:
    if inspect_lora(folder, max_rank=max_rank) != commit.lora:
        raise AdapterRefusedError(
            "differs from what its commit says about it",
            where=commit.adapter.name,
            fix="Run the same version of the agent on the trainer",
        )


def _staged(path: Path, commit: Commit, phases_s: dict[str, float]) -> StagedAdapter:
    return StagedAdapter(
        path=path,
        digest=commit.adapter.digest,
        total_bytes=commit.total_bytes,
        phases_s=phases_s,
    )


def _is_sound(folder: Path, commit: Commit) -> bool:
    try:
        found = {file.name: (file.size_bytes, file.sha256) for file in inspect_files(folder)}
    except (AdapterRefusedError, OSError):
        return False
    return found == {file.name: (file.size_bytes, file.sha256) for file in commit.files}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading from the bucket -----------------------------------------------------------------


class _BucketReadError(Exception):
    """Reading a file of the bucket failed, as opposed to writing it on local disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Reader:
    """Copies the files of one commit. A file may come late, or go while it is read."""

    run_dir: Path
    commit: Commit
    listing: Listing
    wait: Callable[[float], object]

    def copy(self, file: CommitFile, target: Path) -> None:
        waits_s = iter(RETRY_WAITS_S)
        while True:
            try:
                return self._copy_once(file, target)
            except _BucketReadError as failed:
                wait_s = next(waits_s, None)
                if wait_s is None or failed.error.errno in DEAD_ERRNOS:
                    raise self._explained(failed.error, file) from failed.error
                log.info("staging.retry", key=file.key, error=failed.error.strerror)
                self.wait(wait_s)

    def _copy_once(self, file: CommitFile, target: Path) -> None:
        source = self.run_dir / file.key
        folder, _, name = file.key.rpartition("/")
        if name not in self.listing.names(folder):
            raise _BucketReadError(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        size_bytes, sha256 = _copy_hashed(source, target, file.size_bytes)
        if size_bytes != file.size_bytes:
            raise _corrupt(source, f"does not have the {file.size_bytes} bytes of its commit")
        if sha256 != file.sha256:
            raise _corrupt(source, "does not have the sha256 of its commit")

    def _explained(
        self, error: OSError, file: CommitFile
    ) -> AdapterRefusedError | BucketUnavailableError:
        """A pruner deletes the commit first, so data missing behind one that stays is late."""
        path = self.run_dir / file.key
        if error.errno != errno.ENOENT:
            return unavailable(error, path)
        attempt, version = self.commit.attempt, self.commit.version
        keys = list_commits(self.run_dir, attempt, version - 1, listing=self.listing)
        if any(key.startswith(commit_key(attempt, version).removesuffix(".toml")) for key in keys):
            return BucketUnavailableError(
                "its commit is there and this file is not: late, or deleted by hand",
                where=str(path),
                fix="A newer version replaces it; if it lasts, see the mount's cache options",
            )
        return AdapterRefusedError("was pruned", where=str(path), fix="The newest is taken instead")


def _copy_hashed(source: Path, target: Path, limit_bytes: int) -> tuple[int, str]:
    """Size and sha256 of the copy, which stops once it is larger than the limit."""
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as sink:
        for chunk in _read(source):
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                break
            digest.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    return size_bytes, digest.hexdigest()


def _read(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb", buffering=0) as file:
            yield from chunks(file)
    except OSError as error:
        raise _BucketReadError(error) from error


def _corrupt(path: Path, what: str) -> AdapterRefusedError:
    return AdapterRefusedError(what, where=str(path), fix="See who else writes to the bucket")
