"""One script of calls on the strict mount, on rclone's and on s3fs's: where they agree, and where
they do not. What the agent relies on is what all three do alike.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes import s3_mounts, seaweedfs
from fakes.s3_mounts import KINDS
from fakes.strict_mount import StrictBucket

pytestmark = pytest.mark.slow

DATA = b"x" * 100_000
CHUNKS = 30
SEEN_S = 5.0
STALE_S = 1.5  # rclone believes a listing for a second


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A new folder as its writer sees it, and as another host does."""

    here: Path
    there: Path

    def seen_bytes(self, name: str, patience_s: float = SEEN_S) -> int:
        """The size that the other host shows in the end, 0 for no such file; listings first."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            folders = ((self.there.parent, self.there.name), (self.there, name))
            if all(wanted in os.listdir(folder) for folder, wanted in folders):
                return (self.there / name).stat().st_size
            time.sleep(0.05)  # noqa: TID251 - mounts have no virtual clock
        return 0

    def file(self) -> Path:
        path = self.here / "f"
        path.write_bytes(DATA)
        return path


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ends]]:
    """By name: the roots of a writing and of a reading host."""
    with ExitStack() as stack:
        bucket = StrictBucket(tmp_path_factory.mktemp("strict"))
        strict = [
            stack.enter_context(bucket.mount(name, read_only=name == "reader")).path
            for name in ("writer", "reader")
        ]
        found = {"strict": Ends(here=strict[0], there=strict[1])}
        store = stack.enter_context(seaweedfs.serving(tmp_path_factory.mktemp("s3")))
        for kind in KINDS:
            folder = tmp_path_factory.mktemp(kind)
            writer = s3_mounts.mounted(kind, store.address, folder / "writer")
            reader = s3_mounts.mounted(kind, store.address, folder / "reader", read_only=True)
            found[kind] = Ends(
                here=stack.enter_context(writer).path, there=stack.enter_context(reader).path
            )
        yield found


# --- the script ------------------------------------------------------------------------------


def created(ends: Ends) -> str:
    ends.file()
    return "whole" if ends.seen_bytes("f") == len(DATA) else "not seen"


def created_by_name_twice(ends: Ends) -> str:
    ends.file().open("xb")
    return "ok"


def written_and_not_closed(ends: Ends) -> str:
    with (ends.here / "f").open("xb", buffering=0) as file:
        file.write(DATA)
        return "seen" if ends.seen_bytes("f", STALE_S) else "not seen"


def synced_and_not_closed(ends: Ends) -> str:
    with (ends.here / "f").open("xb", buffering=0) as file:
        file.write(DATA)
        os.fsync(file.fileno())
        return "seen" if ends.seen_bytes("f", STALE_S) else "not seen"


def writer_killed(ends: Ends) -> str:
    """A child writes most of a file and dies with it open."""
    child = multiprocessing.get_context("forkserver").Process(
        target=os.execv, args=("/bin/sh", ["sh", "-c", _KILLED, "sh", str(ends.here / "f")])
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return "cut" if 0 < ends.seen_bytes("f") < CHUNKS * len(DATA) else "not seen"


_KILLED = f'exec >"$1"; head -c {len(DATA) * (CHUNKS - 1)} /dev/zero; kill -9 $$'


def folder_made(ends: Ends) -> str:
    (ends.here / "d").mkdir()
    return "seen" if "d" in shown(ends) else "not seen"


def shown(ends: Ends) -> list[str]:
    """Names in the folder, once the other host can have seen them."""
    time.sleep(STALE_S)  # noqa: TID251 - mounts have no virtual clock
    with suppress(FileNotFoundError):
        return os.listdir(ends.there)
    return []


def folder_made_twice(ends: Ends) -> str:
    (ends.here / "d").mkdir()
    (ends.here / "d").mkdir()
    return "ok"


def overwritten(ends: Ends) -> str:
    ends.file().write_bytes(b"new")
    return "ok"


def appended(ends: Ends) -> str:
    with ends.file().open("ab") as file:
        file.write(b"more")
    return "ok"


def written_with_a_hole(ends: Ends) -> str:
    file = (ends.here / "f").open("xb", buffering=0)
    file.seek(4096)
    try:
        file.write(b"x")
    finally:
        with suppress(OSError):  # the first error is the one to compare
            file.close()
    return "ok"


def renamed(ends: Ends) -> str:
    ends.file().rename(ends.here / "g")
    return "ok"


def folder_renamed(ends: Ends) -> str:
    ends.file()
    ends.here.rename(ends.here.with_name(f"{ends.here.name}-2"))
    return "ok"


def linked(ends: Ends) -> str:
    (ends.here / "l").symlink_to("f")
    return "ok"


def removed(ends: Ends) -> str:
    ends.file().unlink()
    return "ok"


def read_only_written(ends: Ends) -> str:
    ends.file()
    ends.seen_bytes("f")
    (ends.there / "g").write_bytes(DATA)
    return "ok"


@pytest.mark.parametrize(
    ("call", "strict", "rclone", "s3fs"),
    [
        # What the agent relies on.
        (created, "whole", "whole", "whole"),
        (written_and_not_closed, "not seen", "not seen", "not seen"),
        (created_by_name_twice, "EEXIST", "EEXIST", "EEXIST"),
        (folder_made_twice, "EEXIST", "EEXIST", "EEXIST"),
        (read_only_written, "EROFS", "EROFS", "EROFS"),
        # What it must be ready for.
        (writer_killed, "cut", "cut", "cut"),
        (synced_and_not_closed, "seen", "not seen", "seen"),
        (folder_made, "not seen", "not seen", "seen"),
        (removed, "EPERM", "ok", "ok"),
        # What it never does.
        (overwritten, "EPERM", "ok", "ok"),
        (appended, "EPERM", "EPERM", "ok"),
        (written_with_a_hole, "EINVAL", "ESPIPE", "ok"),
        (renamed, "ENOSYS", "ok", "ok"),
        (folder_renamed, "EPERM", "ok", "ok"),
        (linked, "EPERM", "EIO", "ok"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_same_call_on_three_mounts(
    mounts: dict[str, Ends], call: Callable[[Ends], str], strict: str, rclone: str, s3fs: str
) -> None:
    found = {name: outcome(call, root, f"{call.__name__}-{name}") for name, root in mounts.items()}
    assert found == {"strict": strict, "rclone": rclone, "s3fs": s3fs}


def outcome(call: Callable[[Ends], str], root: Ends, folder: str) -> str:
    ends = Ends(here=root.here / folder, there=root.there / folder)
    ends.here.mkdir()
    try:
        return call(ends)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
