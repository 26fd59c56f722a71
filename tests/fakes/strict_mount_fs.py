"""Mountpoint for Amazon S3, as strict as its documentation: one process is one mount of one host.

Only new files, each written once from its start to its end, and visible to all at once when it is
complete. Nothing is renamed, linked, extended or given a mode; whatever breaks a rule costs the
upload, and on this mount the name as well. Who holds a rule to be wrong finds it in
`fakes/test_strict_mount.py`. Not modelled: READDIRPLUS, retries, keys that hide each other.

    python -m fakes.strict_mount_fs OPTIONS    as JSON, see `strict_mount_control.Options`
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IFDIR, S_IFREG, S_ISREG
from typing import Final, NoReturn

import msgspec

# Without types of its own. It takes any object whose methods have the names of its operations.
from mfusepy import FUSE, fuse_get_context  # type: ignore[import-untyped]

from fakes.strict_mount_control import Control, Operation, Options
from fakes.strict_mount_handles import Reader, State, Upload
from fakes.strict_mount_memory import ABSENT, UNKNOWN, Memory
from fakes.strict_mount_objects import FOLDER, NANOSECONDS, Entry, Objects

SOURCE: Final = "mountpoint-s3"
PART_BYTES: Final = 8 << 20
PAGE_KEYS: Final = 1000
SEEK_BYTES: Final = 1 << 20  # the kernel reads ahead in parallel, so parts come in any order


class StrictMount:
    """What the kernel may ask. Left out on purpose: create (so that it uses mknod and open),
    extended attributes, locks, fallocate and ioctl, which are answered with ENOSYS."""

    use_ns = True

    def __init__(self, options: Options, control: Control) -> None:
        self._options = options
        self._control = control
        self._objects = Objects(Path(options.bucket))
        self._began_ns = time.time_ns()
        self._lock = threading.Lock()  # of all tables below
        self._folders: set[str] = set()  # made here, and in S3 only with their first object
        self._uploads: dict[str, Upload] = {}
        self._handles: dict[int, Upload | Reader] = {}
        self._numbers = itertools.count(1)
        self._memory = Memory(options)

    def init(self, path: str) -> None:
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.buffer.flush()

    # --- looking ----------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        key = _key(path)
        if not key:
            return self._attributes(FOLDER)
        with self._operation("lookup", key):
            entry = self._look(key)
            if entry is None:
                refuse(errno.ENOENT)
        return self._attributes(entry)

    def readdir(self, path: str, fh: int) -> list[str]:
        key = _key(path)
        with self._operation("readdir", key):
            found = self._objects.below(key)
            self._control.count(list=1 + len(found) // PAGE_KEYS)
            with self._lock:
                for name, entry in found.items():
                    self._memory.keep(f"{key}/{name}".lstrip("/"), entry)
                here = {*self._folders, *self._uploads}
            mine = {name for folder, _, name in (k.rpartition("/") for k in here) if folder == key}
        return [".", "..", *sorted({*found, *mine})]

    def statfs(self, path: str) -> dict[str, int]:
        blocks = 1 << 40
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": blocks, "f_bavail": blocks}

    def _look(self, key: str, *, opening: bool = False) -> Entry | None:
        with self._lock:
            upload = self._uploads.get(key)
            if upload is not None:
                return Entry(is_folder=False, size_bytes=upload.size_bytes)
            if key in self._folders:
                return FOLDER
            known = self._memory.recall(key, opening=opening)
        if known is not UNKNOWN:
            return None if known is ABSENT else known
        self._control.count(head=1, list=1)
        found = self._objects.find(key)
        with self._lock:
            self._memory.keep(key, found)
        return found

    def _attributes(self, entry: Entry) -> dict[str, int]:
        modified_ns = self._began_ns if entry.is_folder else entry.modified_s * NANOSECONDS
        return {
            "st_mode": S_IFDIR | 0o755 if entry.is_folder else S_IFREG | 0o644,
            "st_nlink": 2 if entry.is_folder else 1,
            "st_size": entry.size_bytes,
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            "st_mtime": modified_ns,
            "st_ctime": modified_ns,
            "st_atime": modified_ns,
        }

    # --- folders ----------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int) -> None:
        key = _key(path)
        with self._operation("mkdir", key):
            if self._look(key, opening=True) is not None:
                refuse(errno.EEXIST)
            with self._lock:
                self._memory.forget(key)
                self._folders.add(key)

    def rmdir(self, path: str) -> None:
        key = _key(path)
        with self._lock:
            if key not in self._folders or self._objects.find(key) is not None:
                refuse(errno.EPERM)
            if any(k.startswith(f"{key}/") for k in (*self._folders, *self._uploads)):
                refuse(errno.ENOTEMPTY)
            self._folders.discard(key)
            self._memory.forget(key)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        refuse(errno.ENOSYS)

    # --- opening ----------------------------------------------------------------------------

    def mknod(self, path: str, mode: int, dev: int) -> None:
        key = _key(path)
        if not S_ISREG(mode):
            refuse(errno.EPERM)
        with self._operation("create", key):
            if self._look(key, opening=True) is not None:
                refuse(errno.EEXIST)
            with self._lock:
                self._memory.forget(key)
                self._uploads[key] = Upload(key)

    def open(self, path: str, flags: int) -> int:
        key = _key(path)
        mode = flags & os.O_ACCMODE
        with self._operation("open", key):
            if flags & (os.O_SYNC | os.O_DSYNC):
                refuse(errno.EINVAL)
            with self._lock:
                upload = self._uploads.get(key)
            if upload is not None:
                if mode == os.O_RDONLY or upload.state is not State.UNOPENED:
                    refuse(errno.EPERM)
                return self._begin(upload)
            entry = self._look(key, opening=True)
            if entry is None:
                refuse(errno.ENOENT)
            if mode == os.O_RDONLY or (mode == os.O_RDWR and not flags & os.O_TRUNC):
                return self._open_reader(key, entry)
            if not (self._options.allow_overwrite and flags & os.O_TRUNC) or self._is_read(key):
                refuse(errno.EPERM)
            return self._begin(Upload(key))

    def _is_read(self, key: str) -> bool:
        with self._lock:
            return any(isinstance(h, Reader) and h.key == key for h in self._handles.values())

    def _begin(self, upload: Upload) -> int:
        upload.descriptor, upload.path = self._objects.new_upload()
        upload.opener = _process(fuse_get_context()[2])
        upload.state = State.WRITING
        with self._lock:
            self._uploads[upload.key] = upload
            number = next(self._numbers)
            self._handles[number] = upload
        return number

    def _open_reader(self, key: str, entry: Entry) -> int:
        try:
            descriptor = self._objects.open(key)
        except FileNotFoundError:  # remembered, and gone
            refuse(errno.ENOENT)
        with self._lock:
            number = next(self._numbers)
            self._handles[number] = Reader(key, entry.etag, descriptor)
        return number

    # --- reading ----------------------------------------------------------------------------

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        reader = self._handles[fh]
        if isinstance(reader, Upload):
            refuse(errno.EBADF)
        with reader.breaking(), self._operation("read", reader.key):
            if reader.broken:
                refuse(reader.broken)
            now = self._objects.find(reader.key)
            if now is None:
                refuse(errno.EIO)
            if now.etag != reader.etag:
                refuse(errno.ESTALE)
            ahead = reader.next_offset
            if ahead is None or abs(offset - ahead) > SEEK_BYTES:
                self._control.count(get=1)  # what is read in sequence comes with one request
            data = os.pread(reader.descriptor, size, offset)
            reader.next_offset = offset + len(data)
            return data

    # --- writing ----------------------------------------------------------------------------

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        upload = self._upload(fh)
        with upload.at_its_cost(), self._operation("write", upload.key), upload.lock:
            if upload.state is not State.WRITING:
                refuse(errno.EIO)
            if offset != upload.size_bytes:
                refuse(errno.EINVAL)
            upload.size_bytes += os.write(upload.descriptor, data)
        return len(data)

    def truncate(self, path: str, length: int) -> None:
        self._refuse_if_complete(path)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        if isinstance(self._handles[fh], Reader):
            return
        upload = self._upload(fh)
        with upload.at_its_cost(), self._operation("fsync", upload.key):
            self._complete(upload)

    def flush(self, path: str, fh: int) -> None:
        """One close. The upload stays open for an empty file, and for a close by a child."""
        if isinstance(self._handles[fh], Reader):
            return
        upload = self._upload(fh)
        with upload.at_its_cost(), self._operation("close", upload.key):
            closer = _process(fuse_get_context()[2])
            if upload.state is State.DEAD or (upload.size_bytes and closer == upload.opener):
                self._complete(upload)

    def release(self, path: str, fh: int) -> None:
        """The last reference has gone; nobody hears of an error any more."""
        with self._lock:
            handle = self._handles.pop(fh)
        if isinstance(handle, Upload):
            with suppress(OSError):
                self._complete(handle)
        os.close(handle.descriptor)

    def _upload(self, fh: int) -> Upload:
        handle = self._handles[fh]
        if isinstance(handle, Reader):
            refuse(errno.EBADF)
        return handle

    def _complete(self, upload: Upload) -> None:
        with upload.lock:
            if upload.state is State.DONE:
                return
            if upload.state is not State.WRITING:
                refuse(errno.EIO)
            if self._options.commit_delay_s:
                threading.Event().wait(self._options.commit_delay_s)
            key, visible_after_s = upload.key, self._options.visible_after_s
            self._objects.put(upload.path, key, visible_after_s=visible_after_s)
            upload.state = State.DONE
        self._control.count(put=max(1, -(-upload.size_bytes // PART_BYTES)))
        with self._lock:
            del self._uploads[key]
            self._folders = {f for f in self._folders if not key.startswith(f"{f}/")}
            self._memory.forget(key)

    # --- what it does not do ----------------------------------------------------------------

    def unlink(self, path: str) -> None:
        key = _key(path)
        with self._operation("unlink", key):
            with self._lock:
                upload = self._uploads.get(key)
                is_written = upload is not None and upload.state is not State.DEAD
                if not self._options.allow_delete or is_written:
                    refuse(errno.EPERM)
                self._uploads.pop(key, None)
                self._memory.forget(key)
            if upload is None:
                self._objects.delete(key)

    def rename(self, old: str, new: str) -> None:
        entry = self._look(_key(old))
        refuse(errno.EPERM if entry is not None and entry.is_folder else errno.ENOSYS)

    def link(self, target: str, source: str) -> None:
        refuse(errno.EPERM)

    def symlink(self, target: str, source: str) -> None:
        refuse(errno.EPERM)

    def chmod(self, path: str, mode: int) -> None:
        self._refuse_if_complete(path)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._refuse_if_complete(path)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._refuse_if_complete(path)

    def _refuse_if_complete(self, path: str) -> None:
        with self._lock:
            if _key(path) not in self._uploads:
                refuse(errno.EPERM)

    @contextmanager
    def _operation(self, op: Operation, key: str) -> Iterator[None]:
        with self._control.operation(op, key, _process(fuse_get_context()[2])):
            yield


def refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


def _key(path: str) -> str:
    return path.removeprefix("/")


def _process(thread: int) -> int:
    """The process of a thread: the kernel names the thread that made the call."""
    with suppress(OSError):
        for line in Path(f"/proc/{thread}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return thread


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    control = Control(options.latency_s)
    streams = (sys.stdin.buffer, sys.stdout.buffer)
    threading.Thread(target=control.serve, args=streams, daemon=True).start()
    serve(options, control)


def serve(options: Options, control: Control) -> None:
    """Mount it, until it is unmounted or SIGTERM comes."""
    FUSE(
        StrictMount(options, control),
        options.path,
        foreground=True,
        fsname=SOURCE,
        ro=options.read_only,
        default_permissions=True,
        hard_remove=True,
        entry_timeout=options.kernel_ttl_s,
        attr_timeout=options.kernel_ttl_s,
        negative_timeout=0,
    )
    os._exit(0)  # an ordinary exit waits for the thread that reads standard input


if __name__ == "__main__":
    main()
