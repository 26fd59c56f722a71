import errno
import os
import subprocess  # noqa: TID251 - mounts are made by commands
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncgrpo_agent.core.adapters import commit_key
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.store import bucket
from asyncgrpo_agent.store.bucket import commit_folders, list_attempts, list_commits
from asyncgrpo_agent.store.heartbeat import Heartbeat
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import MountWatch
from fakes.adapters import CONFIG, WEIGHTS
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    root = tmp_path / "bucket"
    root.mkdir()
    return FakeTrainer(tmp_path / "local", root / "run")


def test_what_is_published_is_listed_and_reads_back(trainer: FakeTrainer) -> None:
    published = trainer.publish(7, live=[])
    assert published.commit_key == "commits/a0001-7f3c/000000/v000007.toml"
    assert trainer.keys() == [published.commit_key]
    found = trainer.read(published.commit_key)
    assert found.adapter == published.adapter
    assert found.commit.total_bytes == published.total_bytes
    assert published.phases_s.keys() == {"check", "copy", "commit"}
    for file in found.commit.files:
        assert (trainer.run_dir / file.key).stat().st_size == file.size_bytes


def test_the_commit_is_written_last(trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        written.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    trainer.publish(1)
    assert written == [CONFIG, WEIGHTS, "v000001.toml"]


def test_the_bucket_sees_new_folders_new_files_and_listings_only(trainer: FakeTrainer) -> None:
    """All that Mountpoint allows, and no other call with a path in the bucket."""
    local = trainer.save(1)
    seen: list[tuple[str, object]] = []
    watching = True

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if watching and str(trainer.run_dir.parent) in str(arguments):
            seen.append((event, arguments[2] if event == "open" else ""))

    sys.addaudithook(audit)  # cannot be removed, only silenced
    trainer.publish(1, local)
    watching = False
    assert {event for event, _ in seen} == {"os.mkdir", "os.scandir", "open"}
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    assert [flags for event, flags in seen if event == "open"] == [new] * 3


def fail_writes(
    monkeypatch: pytest.MonkeyPatch, number: int, when: Callable[[str], bool]
) -> list[str]:
    """Fsync fails for paths that `when` picks, as it does when an upload is refused."""
    failed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if when(path):
            failed.append(path)
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return failed


def test_a_failed_name_is_never_used_again(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(
        monkeypatch, errno.EIO, lambda path: "/v000007/" in path or path.endswith("v000007.toml")
    )
    published = trainer.publish(7)
    assert published.commit_key == "commits/a0001-7f3c/000000/v000007-r1.toml"
    keys = trainer.keys()
    assert keys == [published.commit_key, "commits/a0001-7f3c/000000/v000007.toml"]
    found = trainer.read(keys[0]).commit
    assert {file.key.split("/")[2] for file in found.files} == {"v000007-r1"}


def test_an_existing_name_leads_to_the_next(trainer: FakeTrainer) -> None:
    first = trainer.publish(7)
    again = trainer.publish(7, trainer.save(8))
    assert again.commit_key.endswith("v000007-r1.toml")
    assert trainer.read(first.commit_key).adapter == first.adapter
    assert again.adapter.digest != first.adapter.digest


def test_names_spoilt_by_earlier_publications_do_not_use_up_the_tries(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = trainer.save(7)
    with monkeypatch.context() as failing:
        fail_writes(failing, errno.EIO, lambda _: True)
        for _ in range(3):
            with pytest.raises(BucketUnavailableError, match="EIO"):
                trainer.publish(7, local)
    published = trainer.publish(7, local)
    assert {file.key.split("/")[2] for file in trainer.read(published.commit_key).commit.files} == {
        "v000007-r12"
    }


def test_a_full_bucket_can_be_published_to_once_there_is_room(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = trainer.save(7)
    for _ in range(6):  # each leaves a part under a name
        with monkeypatch.context() as failing:
            fail_writes(failing, errno.ENOSPC, lambda path: path.endswith(WEIGHTS))
            with pytest.raises(BucketUnavailableError, match="ENOSPC"):
                trainer.publish(7, local)
    assert trainer.read(trainer.publish(7, local).commit_key).commit.version == 7


def test_in_the_end_the_error_names_path_and_errno(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_writes(monkeypatch, errno.EPERM, lambda path: path.endswith(WEIGHTS))
    with pytest.raises(BucketUnavailableError, match=r"v000007-r3/adapter_model.*EPERM"):
        trainer.publish(7)
    assert len(failed) == 4
    assert trainer.keys() == []


def test_a_full_or_dead_bucket_is_not_tried_again(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_writes(monkeypatch, errno.ENOTCONN, lambda _: True)
    with pytest.raises(BucketUnavailableError, match="the mount is dead"):
        trainer.publish(7)
    assert len(failed) == 1


def test_what_vllm_would_refuse_never_reaches_the_bucket(trainer: FakeTrainer) -> None:
    for local, reason in [
        (trainer.save(1, rank=16), "max_lora_rank = 16"),
        (trainer.save(2), "pickled weights only"),
        (trainer.save(3), "claims a header"),
        (trainer.folder / "none", "has no adapter_config.json"),
    ]:
        if local.name == "v2":
            (local / WEIGHTS).rename(local / "adapter_model.bin")
        if local.name == "v3":
            (local / WEIGHTS).write_bytes((local / WEIGHTS).read_bytes()[:100])
        with pytest.raises(AdapterRefusedError, match=reason) as caught:
            trainer.publish(1, local)
        assert str(local) in caught.value.where
    with pytest.raises(AdapterRefusedError, match="belongs to run"):
        trainer.publish(1, trainer.save(4), run="../other")
    assert list(trainer.run_dir.parent.iterdir()) == []


def test_files_that_change_during_the_copy_are_not_committed(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = trainer.save(1)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        (local / WEIGHTS).write_bytes(b"x" + (local / WEIGHTS).read_bytes()[1:])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(AdapterRefusedError, match="changed while"):
        trainer.publish(1, local)
    assert trainer.keys() == []


def test_a_missing_bucket_is_named(trainer: FakeTrainer) -> None:
    trainer.run_dir.parent.rmdir()
    with pytest.raises(BucketUnavailableError, match="ENOENT"):
        trainer.publish(1)


def empty_commits(trainer: FakeTrainer, versions: range) -> None:
    for version in versions:
        path = trainer.run_dir / commit_key(ATTEMPT, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were listed, as they come."""
    folders: list[Path] = []
    real = os.scandir

    def scandir(folder: Path) -> object:
        folders.append(folder)
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    return folders


def test_only_the_newest_folders_are_listed(trainer: FakeTrainer, listed: list[Path]) -> None:
    empty_commits(trainer, range(0, 1600, 50))
    listing = Listing(trainer.run_dir)
    keys = list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing)
    assert keys[0] == commit_key(ATTEMPT, 1550)
    assert keys[-1] == commit_key(ATTEMPT, 1000)
    listed.clear()
    assert list_commits(trainer.run_dir, ATTEMPT, 1500, listing=listing) == [keys[0]]
    assert [folder.name for folder in listed] == [ATTEMPT, "000003"]


def test_nothing_is_opened_that_no_listing_has_shown(
    trainer: FakeTrainer, listed: list[Path]
) -> None:
    listing = Listing(trainer.run_dir)
    root = trainer.run_dir.parent
    assert list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing) == []
    assert listed == [root]
    trainer.run_dir.mkdir()
    assert list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing) == []
    assert listed == [root, root, trainer.run_dir]
    trainer.publish(0)
    assert len(list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing)) == 1


def test_a_folder_that_vanished_is_empty(trainer: FakeTrainer) -> None:
    empty_commits(trainer, range(1))
    listing = Listing(trainer.run_dir)
    assert len(list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing)) == 1
    trainer.run_dir.rename(trainer.run_dir.with_name("away"))
    assert list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing) == []
    trainer.run_dir.with_name("away").rename(trainer.run_dir)
    assert len(list_commits(trainer.run_dir, ATTEMPT, -1, listing=listing)) == 1


def test_attempts_leave_traces_in_both_places(trainer: FakeTrainer) -> None:
    assert list_attempts(trainer.run_dir) == []
    for name in ["commits/a0002-0000", "adapters/a0010-ffff", "adapters/a0002-0000", "commits/x"]:
        (trainer.run_dir / name).mkdir(parents=True)
    assert [str(a) for a in list_attempts(trainer.run_dir)] == ["a0002-0000", "a0010-ffff"]


def test_where_the_next_commit_will_show(trainer: FakeTrainer) -> None:
    run = trainer.run_dir
    assert commit_folders(run, ATTEMPT) == [run.parent]
    run.mkdir()
    assert commit_folders(run, ATTEMPT) == [run]
    (run / "commits").mkdir()
    assert commit_folders(run, ATTEMPT) == commit_folders(run, None) == [run / "commits"]
    attempt = run / "commits" / ATTEMPT
    attempt.mkdir()
    assert commit_folders(run, ATTEMPT) == [attempt]
    empty_commits(trainer, range(0, 1001, 500))
    assert commit_folders(run, ATTEMPT) == [attempt / "000002", attempt]


def test_a_cut_commit_does_not_count_yet(trainer: FakeTrainer) -> None:
    key = trainer.publish(1).commit_key
    whole = (trainer.run_dir / key).read_bytes()
    for cut in (b"", whole[:-1]):
        (trainer.run_dir / key).write_bytes(cut)
        with pytest.raises(BucketUnavailableError, match="is cut"):
            trainer.read(key)


def test_copies_forgeries_and_odd_keys_are_refused(trainer: FakeTrainer) -> None:
    key = trainer.publish(1).commit_key
    later = commit_key(ATTEMPT, 2)
    (trainer.run_dir / later).write_bytes((trainer.run_dir / key).read_bytes())
    with pytest.raises(AdapterRefusedError, match="is a copy of the commit of run"):
        trainer.read(later)
    with pytest.raises(AdapterRefusedError, match="is not the key of a commit"):
        trainer.read("../../etc/passwd")
    with pytest.raises(AdapterRefusedError, match="not signed") as caught:
        bucket.read_commit(trainer.run_dir, key, run="run", public_key=bytes(PUBLIC_KEY[::-1]))
    assert caught.value.where == str(trainer.run_dir / key)
    with pytest.raises(BucketUnavailableError, match="ENOENT"):
        trainer.read(commit_key(ATTEMPT, 9))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_was_written_across_a_remount_does_not_count(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()

    class Remounts(Heartbeat):
        """As a daemon's death and its successor do, in the middle of a file."""

        done = False

        def pause(self, size_bytes: int) -> None:
            if not self.done:
                self.done = True
                subprocess.run(["umount", "-l", mount], check=True)
                subprocess.run(["mount", "-t", "tmpfs", "bucket", mount], check=True)

    subprocess.run(["mount", "-t", "tmpfs", "bucket", mount], check=True)
    try:
        trainer = FakeTrainer(tmp_path, mount / "run")
        with pytest.raises(BucketUnavailableError, match="mounted anew while it was written"):
            trainer.publish(1, heartbeat=Remounts(), mount=MountWatch(mount))
        again = trainer.publish(1, trainer.folder / "v1", mount=MountWatch(mount))
        assert trainer.read(again.commit_key).adapter.version == 1
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
