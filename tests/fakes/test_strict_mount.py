"""That the strict mount is as strict as Mountpoint: each rule of its documentation as a row."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from asyncgrpo_agent.store.mounts import mount_of
from fakes.strict_mount import CACHE, HF_LIKE, Host, StrictBucket

DATA = b"x" * 100_000
BIG = b"x" * (3 << 20)  # more than one write of the kernel's


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> StrictBucket:
    return StrictBucket(tmp_path_factory.mktemp("strict"))


@pytest.fixture(scope="module")
def writing_host(bucket: StrictBucket) -> Iterator[Host]:
    with bucket.mount("writer") as host:
        yield host


@pytest.fixture(scope="module")
def reading_host(bucket: StrictBucket) -> Iterator[Host]:
    with bucket.mount("reader", read_only=True) as host:
        yield host


@pytest.fixture(scope="module")
def lenient(bucket: StrictBucket) -> Iterator[Host]:
    with bucket.mount("lenient", allow_delete=True, allow_overwrite=True) as host:
        yield host


@pytest.fixture
def writer(writing_host: Host) -> Iterator[Host]:
    yield writing_host
    writing_host.release()


@pytest.fixture
def reader(reading_host: Host) -> Iterator[Host]:
    yield reading_host
    reading_host.release()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A folder of this test's own, on every host."""
    return str(request.node.name).translate(str.maketrans("[]", "--"))


@pytest.fixture
def folder(writer: Host, name: str) -> Path:
    path = writer.path / name
    path.mkdir()
    return path


def refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r"Errno") as caught:
        call()
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[number]


def put(path: Path, data: bytes = DATA) -> Path:
    with path.open("xb") as file:
        file.write(data)
    return path


# --- the mount -------------------------------------------------------------------------------


def test_the_mount_table_looks_like_mountpoints(writer: Host, reader: Host) -> None:
    for host, read_only in ((writer, False), (reader, True)):
        mount = mount_of(host.path)
        assert mount is not None
        assert (mount.fs_type, mount.source) == ("fuse", "mountpoint-s3")
        assert mount.read_only == read_only


def test_free_space_means_nothing(writer: Host) -> None:
    assert shutil.disk_usage(writer.path).free > 1 << 50


def test_a_replica_writes_nothing(reader: Host) -> None:
    refused(errno.EROFS, lambda: (reader.path / "f").open("xb"))
    refused(errno.EROFS, lambda: (reader.path / "d").mkdir())


# --- when an object exists -------------------------------------------------------------------


def test_nothing_is_visible_before_fsync_and_all_of_it_after(
    folder: Path, reader: Host, bucket: StrictBucket
) -> None:
    remote = reader.path / folder.name
    with (folder / "f").open("xb", buffering=0) as file:
        file.write(DATA)
        assert not remote.exists()
        assert bucket.keys(folder.name) == []
        assert (folder / "f").stat().st_size == len(DATA)
        os.fsync(file.fileno())
        assert (remote / "f").read_bytes() == DATA
        refused(errno.EIO, lambda: file.write(b"more"))
    assert bucket.read(f"{folder.name}/f") == DATA


def test_close_completes_too(folder: Path, reader: Host) -> None:
    put(folder / "f")
    assert (reader.path / folder.name / "f").read_bytes() == DATA


def test_an_empty_file_completes_with_its_last_reference(
    folder: Path, bucket: StrictBucket
) -> None:
    descriptor = os.open(folder / "f", os.O_CREAT | os.O_WRONLY)
    os.close(os.dup(descriptor))
    assert bucket.keys(folder.name) == []
    os.close(descriptor)
    wait_until(lambda: bucket.keys(folder.name) == [f"{folder.name}/f"])


def test_a_close_by_a_child_completes_nothing(folder: Path, bucket: StrictBucket) -> None:
    with (folder / "f").open("xb", buffering=0) as file:
        file.write(DATA)
        assert os.waitstatus_to_exitcode(os.waitpid(_spawn_with(file.fileno()), 0)[1]) == 0
        assert bucket.keys(folder.name) == []
        file.write(DATA)
    assert bucket.read(f"{folder.name}/f") == DATA + DATA


def _spawn_with(descriptor: int) -> int:
    """A child that inherits the descriptor, and ends."""
    actions = [(os.POSIX_SPAWN_DUP2, descriptor, 9)]
    return os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)


def test_a_killed_writer_leaves_a_cut_object(writer: Host, name: str, reader: Host) -> None:
    writer.kill_caller("write", pattern=f"{name}/*", skip=1)
    (writer.path / name).mkdir()
    victim = multiprocessing.get_context("forkserver").Process(
        target=Path.write_bytes, args=(writer.path / name / "f", BIG)
    )
    victim.start()
    victim.join()
    assert victim.exitcode == -9
    path = reader.path / name / "f"
    wait_until(path.exists)
    assert 0 < path.stat().st_size < len(BIG)


def test_a_killed_mount_leaves_none(bucket: StrictBucket, name: str) -> None:
    with bucket.mount("doomed") as host:
        file = (host.path / name).open("xb", buffering=0)
        file.write(DATA)
        host.kill()
        refused(errno.ENOTCONN, lambda: file.write(DATA))
        refused(errno.ENOTCONN, lambda: list(host.path.iterdir()))
        refused(errno.ENOTCONN, file.close)
        assert mount_of(host.path) is not None  # the table does not tell
        host.remount()
        assert not (host.path / name).exists()
        assert (put(host.path / name)).read_bytes() == DATA
        host.unmount()
        assert list(host.path.iterdir()) == []
        host.remount()


def test_the_last_of_two_hosts_wins(writer: Host, lenient: Host, name: str, reader: Host) -> None:
    with (writer.path / name).open("xb") as first, (lenient.path / name).open("xb") as last:
        first.write(b"first")
        last.write(b"last")
        first.close()
        assert (reader.path / name).read_bytes() == b"first"
    assert (reader.path / name).read_bytes() == b"last"


# --- writing ---------------------------------------------------------------------------------


def test_only_sequential_writes_and_one_mistake_costs_the_upload(
    folder: Path, bucket: StrictBucket
) -> None:
    descriptor = os.open(folder / "f", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, DATA)
    refused(errno.EINVAL, lambda: os.pwrite(descriptor, b"y", 0))
    refused(errno.EIO, lambda: os.write(descriptor, b"y"))
    refused(errno.EIO, lambda: os.fsync(descriptor))
    refused(errno.EIO, lambda: os.close(descriptor))
    assert bucket.keys(folder.name) == []
    refused(errno.EEXIST, lambda: put(folder / "f"))
    refused(errno.EPERM, lambda: (folder / "f").open("wb"))


def rename_a_folder(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a").rename(folder / "b")


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Its close fails too, and that is not the error to see."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.close(descriptor)


def write_sparse(folder: Path) -> None:
    with opened(folder / "f") as descriptor:
        os.pwrite(descriptor, b"x", 10)


def preallocate(folder: Path) -> None:
    with opened(folder / "f") as descriptor:
        os.posix_fallocate(descriptor, 0, 1000)


def save_as_safetensors_does(folder: Path) -> None:
    """Version 0.8: a temporary file, then a rename to the name."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(DATA)
    Path(file.name).replace(folder / "model.safetensors")


FAILS: list[tuple[int, Callable[[Path], object]]] = [
    (errno.EPERM, lambda folder: put(folder / "f").open("wb")),
    (errno.EPERM, lambda folder: put(folder / "f").open("ab")),
    (errno.EEXIST, lambda folder: put(put(folder / "f"))),
    (errno.EPERM, lambda folder: put(folder / "f").unlink()),
    (errno.ENOSYS, lambda folder: put(folder / "f").rename(folder / "g")),
    (errno.ENOSYS, lambda folder: put(folder / "f").replace(put(folder / "g"))),
    (errno.EPERM, rename_a_folder),
    (errno.EPERM, lambda folder: (folder / "l").symlink_to("f")),
    (errno.EPERM, lambda folder: (folder / "l").hardlink_to(put(folder / "f"))),
    (errno.EPERM, lambda folder: put(folder / "f").chmod(0o600)),
    (errno.EPERM, lambda folder: os.chown(put(folder / "f"), 1, 1)),
    (errno.EPERM, lambda folder: os.utime(put(folder / "f"))),
    (errno.EPERM, lambda folder: os.truncate(put(folder / "f"), 1)),
    (errno.ENOTSUP, lambda folder: os.setxattr(put(folder / "f"), "user.a", b"b")),
    (errno.EINVAL, lambda folder: os.open(folder / "f", os.O_CREAT | os.O_WRONLY | os.O_SYNC)),
    (errno.EINVAL, lambda folder: os.open(folder / "f", os.O_CREAT | os.O_WRONLY | os.O_DSYNC)),
    (errno.EINVAL, write_sparse),
    (errno.EINVAL, preallocate),
    (errno.EPERM, lambda folder: os.mkfifo(folder / "p")),
    (errno.EPERM, lambda folder: put(folder / "f").parent.rmdir()),
    (errno.EPERM, lambda folder: shutil.copy(__file__, folder / "f")),
    (errno.EPERM, lambda folder: shutil.copy2(__file__, folder / "f")),
    (errno.ENOSYS, save_as_safetensors_does),
]


@pytest.mark.parametrize("row", range(len(FAILS)))
def test_what_fails(folder: Path, row: int) -> None:
    number, call = FAILS[row]
    refused(number, lambda: call(folder))


def test_copytree_fails_after_its_data_is_complete(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    put(tmp_path / "source" / "f")
    with pytest.raises(shutil.Error, match="not permitted"):
        shutil.copytree(tmp_path / "source", folder / "t", copy_function=shutil.copyfile)
    assert (folder / "t" / "f").read_bytes() == DATA


def test_a_failed_rename_leaves_the_temporary_object(folder: Path, bucket: StrictBucket) -> None:
    refused(errno.ENOSYS, lambda: save_as_safetensors_does(folder))
    (key,) = bucket.keys(folder.name)
    assert key != f"{folder.name}/model.safetensors"
    assert len(bucket.read(key)) == len(DATA)


def dump_json(folder: Path) -> None:
    with (folder / "f").open("x") as file:
        json.dump({"a": 1}, file)


def set_mode_while_writing(folder: Path) -> None:
    with (folder / "f").open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.utime(file.fileno())
        os.ftruncate(file.fileno(), 1000)  # ignored
        file.write(b"x")


def sync_the_folder(folder: Path) -> None:
    """Answered by the kernel, once the mount has said that it does not know how."""
    put(folder / "f")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def map_memory(folder: Path) -> None:
    with (
        put(folder / "f").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert mapped[:] == DATA


WORKS: list[Callable[[Path], object]] = [
    lambda folder: put(folder / "f"),
    lambda folder: (folder / "f").write_bytes(DATA),
    lambda folder: shutil.copyfile(__file__, folder / "f"),
    dump_json,
    set_mode_while_writing,
    sync_the_folder,
    map_memory,
]


@pytest.mark.parametrize("row", range(len(WORKS)))
def test_what_works(folder: Path, bucket: StrictBucket, row: int) -> None:
    WORKS[row](folder)
    assert bucket.keys(folder.name) == [f"{folder.name}/f"]


def test_a_file_being_written_is_neither_read_nor_written_again_here(folder: Path) -> None:
    path = folder / "f"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, DATA)
    refused(errno.EPERM, path.read_bytes)
    refused(errno.EPERM, lambda: path.open("wb"))
    refused(errno.EPERM, path.unlink)
    os.close(descriptor)
    assert path.read_bytes() == DATA


def test_a_handle_for_both_only_reads_what_exists(folder: Path) -> None:
    descriptor = os.open(put(folder / "f"), os.O_RDWR)
    assert os.pread(descriptor, 3, 0) == b"xxx"
    refused(errno.EBADF, lambda: os.write(descriptor, b"y"))
    os.close(descriptor)


def test_locks_say_nothing_about_other_hosts(writer: Host, lenient: Host, name: str) -> None:
    put(writer.path / name)
    with (writer.path / name).open("rb") as here, (lenient.path / name).open("rb") as there:
        fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- folders ---------------------------------------------------------------------------------


def test_folders_are_local_until_an_object_is_below_them(
    folder: Path, reader: Host, bucket: StrictBucket
) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert not (reader.path / folder.name).exists()
    (folder / "a" / "b").rmdir()
    refused(errno.EEXIST, lambda: (folder / "a").mkdir())
    put(folder / "a" / "f")
    assert bucket.keys(folder.name) == [f"{folder.name}/a/f"]
    assert [path.name for path in (reader.path / folder.name).iterdir()] == ["a"]


def test_a_folder_goes_with_its_last_object(lenient: Host, reader: Host, name: str) -> None:
    (lenient.path / name).mkdir()
    path = put(lenient.path / name / "f")
    assert name in os.listdir(reader.path)
    path.unlink()
    assert name not in os.listdir(reader.path)
    assert name not in os.listdir(lenient.path)


def test_the_time_of_a_folder_never_changes(folder: Path, writer: Host) -> None:
    before = folder.stat().st_mtime_ns
    modified_s = put(folder / "f").stat().st_mtime
    assert folder.stat().st_mtime_ns == writer.path.stat().st_mtime_ns == before
    assert modified_s == int(modified_s)


# --- other hosts change things ---------------------------------------------------------------


def test_a_reader_whose_object_was_replaced(lenient: Host, reader: Host, name: str) -> None:
    put(lenient.path / name)
    with (reader.path / name).open("rb", buffering=0) as file:
        assert file.read(10)
        (lenient.path / name).write_bytes(DATA[::-1] + b"y")
        refused(errno.ESTALE, lambda: os.pread(file.fileno(), 10, len(DATA) - 10))
    # For as long as the kernel believes in the old size, a reader gets that much of the new data.
    wait_until(lambda: (reader.path / name).read_bytes()[-1:] == b"y")


def test_a_reader_whose_object_was_deleted(lenient: Host, reader: Host, name: str) -> None:
    put(lenient.path / name)
    with (reader.path / name).open("rb", buffering=0) as file:
        (lenient.path / name).unlink()
        refused(errno.EIO, lambda: file.read(10))
    refused(errno.ENOENT, lambda: (reader.path / name).open("rb"))


def test_no_overwriting_what_is_read_here(lenient: Host, name: str) -> None:
    with put(lenient.path / name).open("rb"):
        refused(errno.EPERM, lambda: (lenient.path / name).open("wb"))
    refused(errno.EPERM, lambda: os.open(lenient.path / name, os.O_WRONLY))


# --- caches ----------------------------------------------------------------------------------

SHORT_HF = replace(HF_LIKE, visible_after_s=0.3, negative_ttl_s=0.8)


def test_a_prober_starves_where_a_lister_does_not(bucket: StrictBucket, name: str) -> None:
    with (
        bucket.mount("hf-writer", preset=SHORT_HF) as writer,
        bucket.mount("hf-prober", preset=SHORT_HF, read_only=True) as prober,
        bucket.mount("hf-lister", preset=SHORT_HF, read_only=True) as lister,
    ):
        began = time.monotonic()
        assert not (prober.path / name).exists()
        put(writer.path / name)
        assert (writer.path / name).read_bytes() == DATA
        assert name not in os.listdir(lister.path)
        wait_until(lambda: name in os.listdir(lister.path))
        listed_s = time.monotonic() - began
        assert (lister.path / name).read_bytes() == DATA
        assert name in os.listdir(prober.path)
        assert not (prober.path / name).exists()  # listed, and still not there
        wait_until((prober.path / name).exists)
        probed_s = time.monotonic() - began
    assert 0.3 <= listed_s < 0.8 <= probed_s < 1.6


def test_with_a_cache_a_listing_ends_the_absence(
    bucket: StrictBucket, writer: Host, name: str
) -> None:
    with bucket.mount("cached", preset=CACHE, read_only=True) as host:
        assert not (host.path / name).exists()
        put(writer.path / name)
        assert not (host.path / name).exists()
        assert name in os.listdir(host.path)
        assert (host.path / name).read_bytes() == DATA


def test_by_default_absence_is_not_remembered(writer: Host, reader: Host, name: str) -> None:
    assert not (reader.path / name).exists()
    put(writer.path / name)
    assert (reader.path / name).exists()


# --- trouble on order ------------------------------------------------------------------------


def test_faults_strike_what_they_are_meant_for(folder: Path, writer: Host) -> None:
    pattern = f"{folder.name}/bad*"
    writer.fail("write", errno.EIO, pattern=pattern, skip=1, times=1)
    with (folder / "bad").open("xb", buffering=0) as file:
        file.write(b"x")
        refused(errno.EIO, lambda: file.write(b"x"))
        refused(errno.EIO, file.close)
    put(folder / "good")
    put(folder / "bad2")
    writer.fail("open", errno.ENOENT, pattern=pattern)
    for _ in range(2):
        refused(errno.ENOENT, lambda: (folder / "bad2").open("rb"))
    assert (folder / "good").read_bytes() == DATA
    writer.release()
    assert (folder / "bad2").read_bytes() == DATA
    assert [call.number for call in writer.calls("write") if call.key.endswith("/bad")] == [
        0,
        errno.EIO,
    ]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("op", ["fsync", "close"])
def test_an_upload_that_fails_late(
    folder: Path, writer: Host, bucket: StrictBucket, op: str, after: bool
) -> None:
    """With `after` S3 has the object, and only the answer was lost."""
    writer.fail("fsync" if op == "fsync" else "close", errno.EIO, after=after, times=1)
    descriptor = os.open(folder / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(descriptor, DATA)
    if op == "fsync":
        refused(errno.EIO, lambda: os.fsync(descriptor))
        refused(errno.EIO, lambda: os.close(descriptor)) if not after else os.close(descriptor)
    else:
        refused(errno.EIO, lambda: os.close(descriptor))
    assert bucket.keys(folder.name) == ([f"{folder.name}/f"] if after else [])


def test_what_hangs_ends_with_a_release_and_with_the_mount(bucket: StrictBucket) -> None:
    with bucket.mount("hanging") as host:
        host.hang("readdir")
        context = multiprocessing.get_context("forkserver")
        victim = context.Process(target=os.listdir, args=(host.path,))
        victim.start()
        host.await_hung()
        victim.kill()
        assert victim.is_alive()  # not even that helps
        host.release()
        victim.join()
        host.hang("lookup")
        victim = context.Process(target=os.stat, args=(host.path / "f",))
        victim.start()
        host.await_hung()
    victim.join()


def test_slow_hosts(bucket: StrictBucket, name: str) -> None:
    latency_s = {"readdir": 0.2}
    with bucket.mount("slow", commit_delay_s=0.2, latency_s=latency_s) as host:
        began = time.monotonic()
        put(host.path / name)
        assert 0.2 <= time.monotonic() - began < 0.4
        os.listdir(host.path)
        assert time.monotonic() - began >= 0.4


# --- what it costs ---------------------------------------------------------------------------


def test_requests_are_counted(folder: Path, writer: Host, reader: Host) -> None:
    before = writer.counters()
    put(folder / "f", b"x" * (9 << 20))
    assert writer.counters().since(before).put == 2
    before = reader.counters()
    assert (reader.path / folder.name / "f").read_bytes()
    cost = reader.counters().since(before)
    assert (cost.lookups, cost.listings, cost.head, cost.list, cost.get) == (2, 0, 3, 3, 1)
    before = reader.counters()
    list(os.scandir(reader.path / folder.name))
    assert reader.counters().since(before).listings == 1


def test_a_mount_is_small(writer: Host) -> None:
    assert writer.rss_mib() < 60


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """For what the kernel tells the mount after the call that caused it has returned."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()
