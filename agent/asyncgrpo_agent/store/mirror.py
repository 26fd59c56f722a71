"""A mirror: a run's adapters on local disk, as a link brought them, laid out as in the bucket.

A replica without a bucket reads its mirror as if it were one; the proxy serves such replicas from
a mirror of its own. An adapter comes as its commit, then its files in the order of their names.
The commit's signature is checked before a byte is kept, so that keys, sizes and hashes are those
that the trainer signed; no other path is ever written.

What a mirror holds is whole: files are written and checked in a temporary folder of the same disk,
synced and renamed, the commit last. A crash leaves temporary folders, or files without a commit,
which the next start removes. Blocking calls, safe to make from several threads; memory is bounded
by what the caller hands in.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from asyncgrpo_agent.core.adapters import AdapterId, parse_attempt, parse_commit_key
from asyncgrpo_agent.core.commits import MAX_COMMIT_BYTES, Commit, CommitFile, decode
from asyncgrpo_agent.errors import AdapterRefusedError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.outgoing import OpenAdapter

log = Log(__name__)

MAX_HELD: Final = 64  # far more than any live window
RESERVE_BYTES: Final = 64 << 20  # of the disk, which state and logs share
_CHUNK_BYTES: Final = 1 << 20
_TEMPORARY: Final = ".tmp-"
_FOREIGN: Final = "See who else writes to this folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An adapter that the mirror holds, and the key of its commit."""

    key: str
    commit: Commit

    @property
    def adapter(self) -> AdapterId:
        return self.commit.adapter

    @property
    def folder(self) -> str:
        """The key of the folder that its files are in."""
        return self.commit.files[0].key.rpartition("/")[0]


class Mirror:
    """The mirror of one run below `root`. Making one tidies up and looks at what is there."""

    def __init__(
        self, root: Path, run: str, public_key: bytes, *, reserve_bytes: int = RESERVE_BYTES
    ) -> None:
        self.run_dir = root / run
        self._run = run
        self._public_key = public_key
        self._reserve_bytes = reserve_bytes
        self._lock = Lock()  # of `_held` and of what has a final name
        self._held: dict[str, Held] = {}
        with _explained(self.run_dir):
            self.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tidy_up()

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def names(self) -> list[str]:
        """The physical names of what is held, oldest first."""
        with self._lock:
            return sorted(self._held, key=lambda name: _age(self._held[name]))

    # --- in -------------------------------------------------------------------------------

    def begin(self, key: str, sealed: bytes) -> Incoming:
        """Take in the adapter of a commit. AdapterRefusedError: never. StoreError: no room."""
        held = Held(key=key, commit=self._verified(key, sealed))
        with _explained(self.run_dir):
            self._check_room(held.commit.total_bytes)
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.run_dir))
            try:
                return Incoming(self, held, sealed, temporary)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def _verified(self, key: str, sealed: bytes) -> Commit:
        parts = parse_commit_key(key)
        if parts is None:
            raise AdapterRefusedError("is not the key of a commit", where=key, fix=_FOREIGN)
        try:
            commit = decode(sealed, run=self._run, public_key=self._public_key)
        except AdapterRefusedError as error:
            error.where = key
            raise
        if (commit.attempt, commit.version) != (parts.attempt, parts.version):
            what = f"is a copy of the commit of {commit.adapter.name}"
            raise AdapterRefusedError(what, where=key, fix=_FOREIGN)
        return commit

    def _check_room(self, size_bytes: int) -> None:
        if len(self._held) >= MAX_HELD:
            raise StoreError(
                f"holds {MAX_HELD} adapters already, and none of them may go",
                where=str(self.run_dir),
                fix="See why so many are in use at once",
            )
        disk = os.statvfs(self.run_dir)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < size_bytes + self._reserve_bytes:
            raise StoreError(
                f"the disk is full: {free_bytes >> 20} MiB are free, and an adapter of"
                f" {size_bytes / 2**20:.1f} MiB must leave {self._reserve_bytes >> 20} MiB",
                where=str(self.run_dir),
                fix="Free some space, or set agent.state_dir to a folder on another disk",
            )

    def place(self, held: Held, sealed: bytes, temporary: Path) -> None:
        """Give whole and checked files their names; the commit comes last."""
        folder, commit = self.run_dir / held.folder, self.run_dir / held.key
        with self._lock:
            if any(other.folder == held.folder for other in self._held.values()):
                raise AdapterRefusedError(
                    "another adapter has its place",
                    where=held.key,
                    fix="See whether two trainers write to this run",
                )
            for parent in (folder.parent, commit.parent):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.exists():  # its commit could not be written
                self._remove(folder)
            temporary.rename(folder)
            _sync(folder.parent)
            _write_whole(self.run_dir, commit, sealed)
            self._held[held.adapter.name] = held

    # --- out ------------------------------------------------------------------------------

    def open(self, name: str) -> OpenAdapter:
        """What is held under `name`, as it lies on the disk now. StoreError if it is not there."""
        with self._lock:
            held = self._held.get(name)
            if held is None:
                raise StoreError("is not in the mirror", where=name)
            with _explained(self.run_dir):
                sealed = (self.run_dir / held.key).read_bytes()
                paths = [self.run_dir / file.key for file in in_order(held.commit)]
                return OpenAdapter(held.adapter, held.key, sealed, paths)

    def shelf(self) -> list[tuple[Held, bytes]]:
        """All that is held, oldest first, with the sealed commits as they lie on the disk now."""
        with self._lock:
            shown = []
            for held in sorted(self._held.values(), key=_age):
                with suppress(OSError):  # it rotted; whoever opens it hears why
                    shown.append((held, (self.run_dir / held.key).read_bytes()))
            return shown

    def recheck(self, name: str) -> bool:
        """Whether the disk still holds what was stored; drops it if not."""
        held = self._held.get(name)
        if held is None:
            return False
        try:
            sound = self._verified(held.key, (self.run_dir / held.key).read_bytes()) == held.commit
            sound = sound and all(self._is_sound(file) for file in held.commit.files)
        except (OSError, AdapterRefusedError):
            sound = False
        if not sound:
            log.error("mirror.corrupt", adapter=name, folder=self.run_dir / held.folder)
            self._drop([name])
        return sound

    def _is_sound(self, file: CommitFile) -> bool:
        digest = hashlib.sha256()
        with (self.run_dir / file.key).open("rb", buffering=0) as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == file.sha256

    # --- away -----------------------------------------------------------------------------

    def prune(self, keep: Collection[str]) -> list[str]:
        """Drop all but `keep` and the newest; gives the names that went."""
        spared = {*keep, *self.names()[-1:]}
        return self._drop([name for name in self.names() if name not in spared])

    def _drop(self, names: Collection[str]) -> list[str]:
        with self._lock, _explained(self.run_dir):
            dropped = [name for name in names if name in self._held]
            for name in dropped:
                held = self._held.pop(name)
                (self.run_dir / held.key).unlink(missing_ok=True)
                self._remove(self.run_dir / held.folder)
        return dropped

    def _remove(self, folder: Path) -> None:
        """Never leaves half of it under its name."""
        doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.run_dir))
        with suppress(FileNotFoundError):
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _tidy_up(self) -> None:
        for path in sorted(self.run_dir.glob("commits/*/*/*")):
            self._look_at(path.relative_to(self.run_dir).as_posix(), path)
        folders = {self.run_dir / held.folder for held in self._held.values()}
        for folder in self.run_dir.glob("adapters/*/*"):
            if folder not in folders:
                self._remove(folder)
        for left in self.run_dir.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)
            left.unlink(missing_ok=True)

    def _look_at(self, key: str, path: Path) -> None:
        """Keep a commit that is sound and whose files are there; their bytes are read later."""
        try:
            with path.open("rb") as file:
                commit = self._verified(key, file.read(MAX_COMMIT_BYTES + 1))
            sizes = [(self.run_dir / file.key).stat().st_size for file in commit.files]
            if sizes == [file.size_bytes for file in commit.files]:
                self._held[commit.adapter.name] = Held(key=key, commit=commit)
                return
        except (OSError, AdapterRefusedError) as error:
            log.warning("mirror.refused", key=key, reason=str(error))
        path.unlink()


class Incoming:
    """One adapter on its way in. Whoever made it calls `discard` in the end, come what may."""

    def __init__(self, mirror: Mirror, held: Held, sealed: bytes, temporary: Path) -> None:
        self.adapter = held.adapter
        self._mirror = mirror
        self._held = held
        self._sealed = sealed
        self._temporary = temporary
        self._files = iter(in_order(held.commit))
        self._sink: BinaryIO | None = None
        self._next()

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes. AdapterRefusedError: not those of the commit. StoreError: the disk."""
        rest = memoryview(data)
        with _explained(self._temporary):
            while rest:
                if self._sink is None:
                    raise self._corrupt("has more bytes than its commit says")
                piece = rest[: self._left_bytes]
                self._sink.write(piece)
                self._digest.update(piece)
                self._left_bytes -= len(piece)
                rest = rest[len(piece) :]
                if not self._left_bytes:
                    self._complete()

    def finish(self) -> None:
        """All bytes are here: have the mirror hold it."""
        if self._sink is not None:
            raise self._corrupt(f"is cut: {self._left_bytes} bytes are missing")
        with _explained(self._temporary):
            _sync(self._temporary)
            self._mirror.place(self._held, self._sealed, self._temporary)

    def discard(self) -> None:
        """Remove what was not finished."""
        if self._sink is not None:
            with suppress(OSError):  # a full disk says so once more
                self._sink.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _next(self) -> None:
        file = next(self._files, None)
        self._sink = None
        if file is not None:
            self._file = file
            self._digest = hashlib.sha256()
            self._left_bytes = file.size_bytes
            path = self._temporary / file.name
            self._sink = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def _complete(self) -> None:
        if self._digest.hexdigest() != self._file.sha256:
            raise self._corrupt("does not have the sha256 of its commit")
        assert self._sink is not None, "a file is being written"
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        self._next()

    def _corrupt(self, what: str) -> AdapterRefusedError:
        fix = "It was altered on its way, or where it was sent from"
        return AdapterRefusedError(what, where=self._file.key, fix=fix)


def in_order(commit: Commit) -> list[CommitFile]:
    """The files in the order in which links carry them."""
    return sorted(commit.files, key=lambda file: file.name)


def _age(held: Held) -> tuple[int, int]:
    return parse_attempt(held.commit.attempt).number, held.commit.version


def _write_whole(folder: Path, target: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(name).rename(target)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(where: Path) -> Iterator[None]:
    """Errors of the local disk as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the mirror cannot be used: {error.strerror or error}",
            where=str(error.filename or where),
            fix="Check free space and permissions of the agent's state folder",
        ) from error
