"""Verified copies of adapters on local disk, one folder a digest, which vLLM loads by path.

A folder named by a digest is complete and verified: files are streamed into a temporary folder
while they are hashed, checked, synced, and renamed as a whole. A crash leaves temporary folders
only, which `clean` removes at the next start. Nothing but this agent may write here.

Blocking calls: `stage` reads the bucket and is for the mount's worker, the others touch the local
disk only.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent.core.adapters import commit_key
from asyncgrpo_agent.core.commits import RESULTS, Commit, CommitFile
from asyncgrpo_agent.errors import (
    AdapterPrunedError,
    AdapterRefusedError,
    BucketUnavailableError,
    StoreError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.bucket import list_commits
from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat
from asyncgrpo_agent.store.inspection import inspect_files, inspect_lora
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import unavailable
from asyncgrpo_agent.store.objects import ObjectReader, UnreadableError, sync_folder, wait

log = Log(__name__)

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
    wait: Callable[[float], object] = wait,
    heartbeat: Heartbeat = SILENT,
) -> StagedAdapter:
    """Copy, verify, and name by digest. What is staged already is verified again and reused.

    AdapterRefusedError: unfit for vLLM. AdapterDamagedError: other bytes than committed.
    AdapterPrunedError: removed. BucketUnavailableError: try later.
    StoreError: the local disk failed. `wait` sleeps between tries; tests replace it.
    """
    listing = listing or Listing(bucket_run_dir)
    source = _Source(ObjectReader(bucket_run_dir, listing, heartbeat, wait), commit)
    try:
        return _reuse(commit, staging_dir, max_rank, heartbeat) or _stage(
            source, staging_dir, max_rank
        )
    except OSError as error:
        raise StoreError(
            f"cannot stage an adapter: {error.strerror}",
            where=str(staging_dir),
            fix="Check free space and permissions of the agent's state folder",
        ) from error


def _reuse(
    commit: Commit, staging_dir: Path, max_rank: int, heartbeat: Heartbeat
) -> StagedAdapter | None:
    """What an earlier round or an earlier process has staged, if it is still sound."""
    began = time.perf_counter()
    target = staging_dir / commit.adapter.digest
    if not target.is_dir():
        return None
    if not _is_sound(target, commit, heartbeat):
        log.error("staging.corrupt", path=target)
        remove(staging_dir, target.name)
        return None
    _check(target, commit, max_rank)
    return _staged(target, commit, {"check": time.perf_counter() - began})


def _stage(source: _Source, staging_dir: Path, max_rank: int) -> StagedAdapter:
    began, commit = time.perf_counter(), source.commit
    target = staging_dir / commit.adapter.digest
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=staging_dir))  # mode 0700
    try:
        for file in commit.files:
            source.copy(file, temporary / file.name)
        copied = time.perf_counter()
        _check(temporary, commit, max_rank)
        checked = time.perf_counter()
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(staging_dir)
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


def _is_sound(folder: Path, commit: Commit, heartbeat: Heartbeat) -> bool:
    try:
        files = inspect_files(folder, heartbeat)
    except (AdapterRefusedError, OSError):
        return False
    found = {file.name: (file.size_bytes, file.sha256) for file in files}
    return found == {file.name: (file.size_bytes, file.sha256) for file in commit.files}


# --- reading from the bucket -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the files of one commit come from."""

    reader: ObjectReader
    commit: Commit

    def copy(self, file: CommitFile, target: Path) -> None:
        try:
            self.reader.copy(file.key, target, size_bytes=file.size_bytes, sha256=file.sha256)
        except UnreadableError as failed:
            raise self._explained(failed.error, file) from failed.error

    def _explained(
        self, error: OSError, file: CommitFile
    ) -> AdapterRefusedError | BucketUnavailableError:
        """A pruner deletes the commit first, so data missing behind one that stays is late. It
        leaves the newest, so a bucket without any is in trouble: the C library gives a folder that
        a mount has lost from sight as an empty one."""
        run_dir, listing = self.reader.run_dir, self.reader.listing
        path = run_dir / file.key
        if error.errno != errno.ENOENT:
            return unavailable(error, path)
        if RESULTS.parse(f"{Path(file.key).parent}.toml") is not None:
            return BucketUnavailableError(
                "its commit is there and this file is not: late, or deleted by hand",
                where=str(path),
                fix="Try again; if it lasts, take the newest version",
            )
        attempt, version = self.commit.attempt, self.commit.version
        keys = list_commits(run_dir, attempt, version - 1, listing=listing)
        if any(key.startswith(commit_key(attempt, version).removesuffix(".toml")) for key in keys):
            return BucketUnavailableError(
                "its commit is there and this file is not: late, or deleted by hand",
                where=str(path),
                fix="A newer version replaces it; if it lasts, see the mount's cache options",
            )
        if not keys:
            return BucketUnavailableError(
                "is not there, nor any newer adapter",
                where=str(path),
                fix="See whether the bucket is empty, and the log of its mount's daemon",
            )
        return AdapterPrunedError("was pruned", where=str(path), fix="The newest is taken instead")
