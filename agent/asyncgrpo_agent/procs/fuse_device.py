"""A FUSE mount for a daemon that may not mount: made here, its device left with systemd.

    asyncgrpo-agent mount-device FOLDER [OPTION OF MOUNT-S3 ...]

The unit of mount-s3 runs this as root before it starts the daemon, which then needs no capability,
no /dev/fuse and no part in the host's mounts: it finds the device as descriptor 3 and serves it as
/dev/fd/3 (Mountpoint 1.14). Of the options only `--read-only` counts, which is for whoever mounts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

DEVICE: Final = "/dev/fuse"
SOURCE: Final = "mountpoint-s3"  # what Mountpoint calls its own mounts
NAME: Final = "fuse"  # of the descriptor, in systemd's store
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOATIME = 1, 2, 4, 1024  # mount(2)


def main(folder: str, options: Sequence[str]) -> int:
    """Mount at `folder`. The result is the exit code."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return _failed("mount-device is for systemd to run", 2)
    try:
        device = os.open(DEVICE, os.O_RDWR)
        mount(device, folder, read_only="--read-only" in options)
        leave(device, address)
    except OSError as error:
        what = f"{folder} cannot be mounted: {error.strerror}: {error.filename or address}"
        return _failed(f"{what}. FUSE takes root, and modprobe fuse", 1)
    return 0


def _failed(what: str, code: int) -> int:
    sys.stderr.write(f"asyncgrpo-agent: error: {what}\n")
    return code


def mount(device: int, folder: str, *, read_only: bool) -> None:
    """Mount what will be served by `device` at `folder`, for all users. Raises OSError."""
    mode = stat.S_IFMT(Path(folder).stat().st_mode)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME | (_MS_RDONLY if read_only else 0)
    data = f"fd={device},rootmode={mode:o},user_id=0,group_id=0,default_permissions,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(SOURCE.encode(), os.fsencode(folder), b"fuse", flags, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), folder)


def leave(device: int, address: str) -> None:
    """Put `device` in place of what systemd holds, and wait until it has it. Raises OSError."""
    where = "\0" + address[1:] if address.startswith("@") else address
    ours, theirs = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(where)
        sender.send(f"FDSTOREREMOVE=1\nFDNAME={NAME}".encode())
        socket.send_fds(sender, [f"FDSTORE=1\nFDNAME={NAME}".encode()], [device])
        socket.send_fds(sender, [b"BARRIER=1"], [theirs])
    os.close(theirs)
    with open(ours, "rb") as barrier:  # systemd closes its end when it has come so far
        barrier.read()
