"""Checkpoints in the bucket: copy one there, list, read a manifest, restore, remove.

A checkpoint is any folder of plain files. Its manifest is written last, so what was cut short does
not exist. A folder that does not stand still while it is copied is refused. Copying comes in steps
(see `store.objects`), for it may take minutes in which adapters must not wait; memory is bounded
by one chunk in both directions. Blocking calls for the mount's worker.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncgrpo_agent.core.adapters import is_attempt
from asyncgrpo_agent.core.checkpoints import (
    Checkpoint,
    CheckpointFile,
    CheckpointKey,
    checkpoint_folder,
    checkpoint_key,
    decode,
    encode,
    parse_folder_name,
    parse_manifest_name,
)
from asyncgrpo_agent.core.seals import MAX_SEALED_BYTES, is_sealed
from asyncgrpo_agent.errors import AdapterDamagedError, AdapterRefusedError, StoreError
from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat
from asyncgrpo_agent.store.inspection import chunks
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import MountWatch, unavailable
from asyncgrpo_agent.store.objects import (
    ObjectReader,
    ObjectWriter,
    Steps,
    UnreadableError,
    changed,
    check_same,
    finished,
    remove,
    remove_if_empty,
    retried,
    sync_folder,
    wait,
)

Looks = dict[str, tuple[int, int, int]]
"""Size, time of the last change in ns, and inode of each file, by its path below the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on local disk, and what its manifest says beside its files."""

    local_dir: Path
    run: str
    attempt: str
    step: int
    base_model: str
    base_model_digest: str
    private_key: bytes = field(repr=False)
    now_unix_s: float
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint that exists. `phases_s` holds seconds by phase: check, copy, commit."""

    key: str
    step: int
    total_bytes: int
    phases_s: dict[str, float]


# --- publishing ------------------------------------------------------------------------------


def look(folder: Path) -> Looks:
    """What is in a folder of plain files and folders. AdapterRefusedError for anything else."""
    found: Looks = {}
    for place, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = Path(place) / name
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise AdapterRefusedError(
                    "is no plain file", where=str(path), fix="Leave it out of the checkpoint"
                )
            key = path.relative_to(folder).as_posix()
            found[key] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def publish_checkpoint(
    saved: SavedCheckpoint,
    bucket_run_dir: Path,
    *,
    mount: MountWatch | None = None,
    heartbeat: Heartbeat = SILENT,
) -> PublishedCheckpoint:
    """Inspect, copy, commit. AdapterRefusedError: unfit, or it changed meanwhile.

    BucketUnavailableError: no commit.
    """
    return finished(publishing(saved, bucket_run_dir, mount=mount, heartbeat=heartbeat))


def publishing(
    saved: SavedCheckpoint,
    bucket_run_dir: Path,
    *,
    mount: MountWatch | None = None,
    heartbeat: Heartbeat = SILENT,
) -> Steps[PublishedCheckpoint]:
    """The same in steps."""
    began = time.perf_counter()
    before = _look(saved)
    files = yield from _inspect(saved, before, heartbeat)
    _sealed(saved, checkpoint_folder(saved.attempt, saved.step), files)  # or refused here
    watch = mount or MountWatch(bucket_run_dir.parent)
    mounted = watch.found()
    watch.check_alive(writable=True)
    checked = time.perf_counter()
    writer = ObjectWriter(bucket_run_dir, heartbeat)

    def copy(retry: int) -> Steps[str]:
        folder = checkpoint_folder(saved.attempt, saved.step, retry)
        for file in files:
            yield from writer.copy(
                saved.local_dir / file.name, f"{folder}/{file.name}", file.sha256
            )
        return folder

    folder = yield from retried(copy)
    if _look(saved) != before:
        raise changed(saved.local_dir)
    copied = time.perf_counter()
    data = _sealed(saved, folder, files)
    key = yield from retried(
        lambda retry: writer.write(checkpoint_key(saved.attempt, saved.step, retry), [data])
    )
    check_same(mounted, watch)
    committed = time.perf_counter()
    return PublishedCheckpoint(
        key=key,
        step=saved.step,
        total_bytes=sum(file.size_bytes for file in files),
        phases_s={
            "check": checked - began,
            "copy": copied - checked,
            "commit": committed - copied,
        },
    )


def _look(saved: SavedCheckpoint) -> Looks:
    """TRL removes old checkpoints, also while one looks."""
    try:
        return look(saved.local_dir)
    except FileNotFoundError as error:
        raise changed(saved.local_dir) from error


def _inspect(
    saved: SavedCheckpoint, looks: Looks, heartbeat: Heartbeat
) -> Steps[list[CheckpointFile]]:
    files = []
    for name in looks:
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with (saved.local_dir / name).open("rb") as file:
                for chunk in chunks(file, heartbeat):
                    digest.update(chunk)
                    size_bytes += len(chunk)
                    yield
        except FileNotFoundError as error:
            raise changed(saved.local_dir / name) from error
        files.append(CheckpointFile(name=name, size_bytes=size_bytes, sha256=digest.hexdigest()))
    return files


def _sealed(saved: SavedCheckpoint, folder: str, files: list[CheckpointFile]) -> bytes:
    checkpoint = Checkpoint(
        run=saved.run,
        attempt=saved.attempt,
        step=saved.step,
        base_model=saved.base_model,
        base_model_digest=saved.base_model_digest,
        created_unix_s=saved.now_unix_s,
        folder=folder,
        settings=saved.settings,
        files=files,
    )
    return encode(checkpoint, saved.private_key)


# --- listing and reading ---------------------------------------------------------------------


def list_checkpoints(listing: Listing) -> dict[str, list[CheckpointKey]]:
    """The manifests of each attempt, oldest first."""
    return {attempt: _manifests(listing, attempt) for attempt in _attempts(listing)}


def list_torn_checkpoints(listing: Listing) -> dict[str, list[CheckpointKey]]:
    """Data whose step has no manifest: on its way, cut short, or removed in part."""
    torn = {}
    for attempt in _attempts(listing):
        whole = {key.step for key in _manifests(listing, attempt)}
        folders = [parse_folder_name(attempt, name) for name in _names(listing, attempt)]
        torn[attempt] = sorted(key for key in folders if key is not None and key.step not in whole)
    return torn


def _attempts(listing: Listing) -> list[str]:
    return sorted(name for name in listing.names("checkpoints") if is_attempt(name))


def _names(listing: Listing, attempt: str) -> set[str]:
    return listing.names(f"checkpoints/{attempt}")


def _manifests(listing: Listing, attempt: str) -> list[CheckpointKey]:
    keys = [parse_manifest_name(attempt, name) for name in _names(listing, attempt)]
    return sorted(key for key in keys if key is not None)


def read_checkpoint(
    bucket_run_dir: Path, key: CheckpointKey, *, run: str, public_key: bytes
) -> Checkpoint:
    """The verified manifest at a key that a listing has shown.

    AdapterDamagedError: cut; its writer died, or still writes. AdapterRefusedError: it will never
    be one. BucketUnavailableError: look again later.
    """
    path = bucket_run_dir / key.key
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SEALED_BYTES + 1)
    except OSError as error:
        raise unavailable(error, path) from error
    if not is_sealed(data):
        raise AdapterDamagedError(
            "is cut: still being written, or its writer died",
            where=str(path),
            fix="Nothing to do; it does not count until it is whole",
        )
    try:
        checkpoint = decode(data, run=run, public_key=public_key)
    except AdapterRefusedError as error:
        error.where = str(path)
        raise
    if (checkpoint.attempt, checkpoint.step) != (key.attempt, key.step):
        raise AdapterRefusedError(
            f"is a copy of the manifest of step {checkpoint.step} of {checkpoint.attempt}",
            where=str(path),
            fix="See who else writes to the bucket",
        )
    return checkpoint


# --- restoring -------------------------------------------------------------------------------


def restore(
    bucket_run_dir: Path,
    checkpoint: Checkpoint,
    target_dir: Path,
    *,
    listing: Listing | None = None,
    wait: Callable[[float], object] = wait,
    heartbeat: Heartbeat = SILENT,
) -> None:
    """Copy a verified checkpoint into a new folder, which is there whole and synced, or not at all.

    AdapterRefusedError: corrupt. BucketUnavailableError: missing, or try later. StoreError: the
    local disk failed, or the folder exists.
    """
    if target_dir.exists():
        raise StoreError(
            "is there already", where=str(target_dir), fix="Move it away, or resume from it"
        )
    reader = ObjectReader(
        bucket_run_dir, listing or Listing(bucket_run_dir, heartbeat), heartbeat, wait
    )
    try:
        _restore(reader, checkpoint, target_dir)
    except OSError as error:
        raise StoreError(
            f"cannot restore a checkpoint: {error.strerror}",
            where=str(target_dir),
            fix="Check free space and permissions of the trainer's output folder",
        ) from error


def _restore(reader: ObjectReader, checkpoint: Checkpoint, target_dir: Path) -> None:
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".tmp-{target_dir.name}-"
    for leftover in target_dir.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target_dir.parent))
    try:
        for file in checkpoint.files:
            target = temporary / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(reader, f"{checkpoint.folder}/{file.name}", target, file)
        for place, _, _ in os.walk(temporary):
            sync_folder(Path(place))
        temporary.rename(target_dir)
        sync_folder(target_dir.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fetch(reader: ObjectReader, key: str, target: Path, file: CheckpointFile) -> None:
    try:
        reader.copy(key, target, size_bytes=file.size_bytes, sha256=file.sha256)
    except UnreadableError as failed:
        raise unavailable(failed.error, reader.run_dir / key) from failed.error


# --- removing --------------------------------------------------------------------------------


def prune_checkpoint(listing: Listing, key: CheckpointKey) -> int:
    """Remove a manifest, and with the last one of its step all data of that step.

    The result is the number of objects removed. DeletionForbiddenError, BucketUnavailableError:
    going on later is safe, for data without a manifest is listed as torn.
    """
    names = _names(listing, key.attempt)
    removed = remove(listing, key.key) if Path(key.key).name in names else 0
    if any(one.step == key.step for one in _manifests(listing, key.attempt)):
        return removed
    for name in sorted(names):
        found = parse_folder_name(key.attempt, name)
        if found is not None and found.step == key.step:
            removed += _remove_below(listing, f"checkpoints/{key.attempt}/{name}")
    return removed


def _remove_below(listing: Listing, folder: str) -> int:
    """A file lists like an empty folder, and an empty folder is none on a mount."""
    removed = 0
    for name in sorted(listing.names(folder)):
        path = f"{folder}/{name}"
        removed += _remove_below(listing, path) if listing.names(path) else _remove(listing, path)
    remove_if_empty(listing, folder)
    return removed


def _remove(listing: Listing, path: str) -> int:
    remove_if_empty(listing, path)
    return remove(listing, path)
