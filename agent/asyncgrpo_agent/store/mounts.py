"""What file system a path is on, and whether it is still the one that was there at the start.

The kernel's mount table answers without touching the mount, so it cannot hang on it. It is asked
before every look at the bucket: after an unmount the bare mount point is an empty, healthy-looking
local folder, and after the death of its daemon a FUSE mount stays in the table but answers
ENOTCONN. Nothing here mounts, unmounts or waits.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent.errors import BucketUnavailableError

_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL_RE: Final = re.compile(r"\\([0-7]{3})")
# Changes made by other hosts raise no inotify event on these. All of FUSE counts as such.
_REMOTE_TYPES: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"}
    | {"prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs"}
)
DEAD_ERRNOS: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
_HINTS: Final = {
    errno.EACCES: "Check the permissions, and --allow-other of the mount",
    errno.EPERM: "Check the permissions of the mount and of its credentials",
    errno.EROFS: "Mount it without --read-only",
    errno.ENOSPC: "Free some space",
    errno.ENOENT: "Create or mount it",
    errno.EEXIST: "See whether a second trainer writes to this run",
    errno.EIO: "See the log of the mount's daemon",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the mount table."""

    mount_id: int
    mount_point: str
    fs_type: str
    source: str
    read_only: bool

    def __str__(self) -> str:
        return f"{self.fs_type} {self.source} on {self.mount_point}"


def parse_mounts(table: str) -> list[Mount]:
    """The mounts of a mountinfo text in its order; later ones cover earlier ones."""
    return [mount for line in table.splitlines() if (mount := _parse_line(line)) is not None]


def _parse_line(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    front, back = left.split(" "), right.split(" ")
    if not separator or len(front) < 6 or len(back) < 3 or not front[0].isdecimal():
        return None
    return Mount(
        mount_id=int(front[0]),
        mount_point=_unescaped(front[4]),
        fs_type=back[0],
        source=_unescaped(back[1]),
        read_only="ro" in front[5].split(",") or "ro" in back[2].split(","),
    )


def _unescaped(text: str) -> str:
    return _OCTAL_RE.sub(lambda match: chr(int(match[1], 8)), text)


def find_mount(mounts: list[Mount], path: str) -> Mount | None:
    """The mount that an absolute path without symbolic links is on."""
    found: Mount | None = None
    for mount in mounts:
        point = mount.mount_point.rstrip("/")
        covers = path == point or path.startswith(f"{point}/") or not point
        if covers and (found is None or len(point) >= len(found.mount_point.rstrip("/"))):
            found = mount
    return found


def mount_of(path: Path) -> Mount | None:
    """Follows symbolic links, so it may wait for the file systems on the way; see `MountWatch`."""
    return find_mount(_read_table(), os.path.realpath(path))


def mounted_at(point: Path) -> Mount | None:
    """What is mounted exactly at `point`, an absolute path without symbolic links.

    Never touches it, so that a dead or hung mount cannot be met.
    """
    at_point = [mount for mount in _read_table() if mount.mount_point == str(point)]
    return at_point[-1] if at_point else None


def is_remote(mount: Mount | None) -> bool:
    """Whether other hosts can change it unnoticed, so that watching means polling."""
    return mount is not None and (
        mount.fs_type.startswith("fuse") or mount.fs_type in _REMOTE_TYPES
    )


def unavailable(error: OSError, path: Path | str) -> BucketUnavailableError:
    """What an error of the operating system means for the bucket."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    if number in DEAD_ERRNOS:
        return BucketUnavailableError(
            f"the mount is dead ({name})",
            where=str(path),
            fix="Unmount it with `umount -l` and start its daemon again",
        )
    fix = _HINTS.get(number, "See the system's log")
    return BucketUnavailableError(f"{os.strerror(number)} ({name})", where=str(path), fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMount:
    """What was mounted under a path, which holds no symbolic links, at some earlier moment."""

    path: str
    mount: Mount | None


class MountWatch:
    """Remembers what was mounted under `path` when it was made, to notice when that goes.

    A remount of the same source is fine; it only gets a new id. With `known`, from an earlier
    watch, making one does not touch the mount either.
    """

    def __init__(self, path: Path, known: KnownMount | None = None) -> None:
        if known is None:
            resolved = os.path.realpath(path)  # once: later the mount may be dead or hung
            known = KnownMount(path=resolved, mount=find_mount(_read_table(), resolved))
        self.known = known
        self.path = Path(known.path)
        self.expected = known.mount

    @property
    def remote(self) -> bool:
        return is_remote(self.expected)

    def found(self) -> Mount | None:
        """What is mounted there now. Never touches the mount."""
        return find_mount(_read_table(), str(self.path))

    def check(self, *, writable: bool = False) -> Mount | None:
        """Never touches the mount. Raises BucketUnavailableError when it is not the same one."""
        found, expected = self.found(), self.expected
        if expected is not None and (found is None or _identity(found) != _identity(expected)):
            raise BucketUnavailableError(
                f"{expected} is gone; the path is now on {found}",
                where=str(self.path),
                fix="Mount it again; the agent goes on by itself",
            )
        if writable and found is not None and found.read_only:
            raise BucketUnavailableError(
                f"{found} is read-only", where=str(self.path), fix=_HINTS[errno.EROFS]
            )
        return found

    def check_alive(self, *, writable: bool = False) -> None:
        """Like `check`, then lists the folder, which may block as long as the mount does."""
        self.check(writable=writable)
        list_names(self.path)


def scan(folder: Path) -> set[str]:
    """The names in a folder, without a look at any of them."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


def list_names(folder: Path) -> set[str]:
    """Like `scan`, for a folder that has to be there."""
    try:
        return scan(folder)
    except OSError as error:
        raise unavailable(error, folder) from error


def _identity(mount: Mount) -> tuple[str, str, str]:
    return (mount.mount_point, mount.fs_type, mount.source)


def _read_table() -> list[Mount]:
    # No escapes that cannot be written as UTF-8: mounts are named in messages.
    return parse_mounts(_TABLE.read_text(encoding="utf-8", errors="backslashreplace"))
