import errno
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.store import mounts
from asyncgrpo_agent.store.mounts import (
    MountWatch,
    find_mount,
    is_remote,
    list_names,
    mount_of,
    mounted_at,
    parse_mounts,
    unavailable,
)

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
MOUNTPOINT = (
    "60 27 0:50 / /mnt/s3 ro,nosuid,nodev,relatime shared:5 master:2 - "
    "fuse mountpoint-s3 rw,user_id=0\n"
)
SPACES = r"61 27 0:51 / /mnt/my\040bucket rw - fuse.rclone weed:my\040lab rw" + "\n"
NFS = "62 27 0:52 / /mnt/s3/deep rw - nfs4 host:/export rw\n"
TABLE = ROOT + MOUNTPOINT + SPACES + NFS


def on(path: str, table: str = TABLE) -> str:
    mount = find_mount(parse_mounts(table), path)
    assert mount is not None
    return f"{mount.fs_type} {mount.source}"


def test_a_path_is_on_its_longest_mount_point() -> None:
    assert on("/mnt/s3/run") == "fuse mountpoint-s3"
    assert on("/mnt/s3") == "fuse mountpoint-s3"
    assert on("/mnt/s3-other") == "ext4 /dev/vda"
    assert on("/mnt/s3/deep/er") == "nfs4 host:/export"
    assert on("/mnt/my bucket/x") == "fuse.rclone weed:my lab"


def test_a_later_mount_covers_an_earlier_one() -> None:
    cover = "70 60 0:60 / /mnt/s3 rw - tmpfs none rw\n"
    assert on("/mnt/s3/run", TABLE + cover) == "tmpfs none"


def test_read_only_and_remote() -> None:
    flags = [(m.read_only, is_remote(m)) for m in parse_mounts(TABLE)]
    assert flags == [(False, False), (True, True), (False, True), (False, True)]
    assert not is_remote(None)


def test_lines_that_are_none_are_skipped() -> None:
    assert parse_mounts("\nno mount\n1 2 - x\n a b c d e f - g h i\n") == []


def test_this_machine_has_a_mount_table(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    assert mount is not None
    assert not mount.read_only


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    monkeypatch.setattr(mounts, "_TABLE", path)
    return path


def test_a_vanished_mount_is_noticed(table: Path) -> None:
    watch = MountWatch(Path("/mnt/my bucket/run"))
    assert watch.remote
    watch.check(writable=True)
    table.write_text(ROOT)
    with pytest.raises(BucketUnavailableError, match="is gone; the path is now on ext4"):
        watch.check()
    table.write_text(TABLE.replace("61 27", "99 27"))
    watch.check()


def test_a_read_only_mount_is_refused_for_writing(table: Path) -> None:
    watch = MountWatch(Path("/mnt/s3"))
    watch.check()
    with pytest.raises(BucketUnavailableError, match="is read-only"):
        watch.check(writable=True)


def test_a_folder_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(BucketUnavailableError, match="ENOENT"):
        MountWatch(tmp_path / "no").check_alive()
    with pytest.raises(BucketUnavailableError, match="ENOENT"):
        list_names(tmp_path / "no")


def test_errors_say_what_to_do() -> None:
    dead = unavailable(OSError(errno.ENOTCONN, "x"), "/mnt/s3")
    assert "the mount is dead (ENOTCONN)" in str(dead)
    assert "umount -l" in dead.fix
    assert "ECONNABORTED" in str(unavailable(OSError(errno.ECONNABORTED, "x"), "/mnt/s3"))
    assert "/mnt/s3: Input/output error (EIO)" in str(
        unavailable(OSError(errno.EIO, "x"), "/mnt/s3")
    )
    assert unavailable(OSError(), "/mnt/s3").fix


def test_what_is_mounted_at_a_place_and_not_above_it(tmp_path: Path) -> None:
    proc = mounted_at(Path("/proc"))
    assert proc is not None
    assert proc.fs_type == "proc"
    assert mounted_at(Path("/proc/self")) is None
    assert mounted_at(tmp_path) is None
