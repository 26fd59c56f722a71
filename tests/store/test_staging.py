import errno
import os
import stat
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError, StoreError
from asyncgrpo_agent.store.bucket import ListedCommit
from asyncgrpo_agent.store.staging import StagedAdapter, clean, remove, stage, staged
from fakes.adapters import CONFIG, WEIGHTS, load, write_adapter
from fakes.bucket import FakeTrainer


class World:
    """A trainer, its bucket and a replica's staging folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "bucket").mkdir()
        self.trainer = FakeTrainer(folder / "local", folder / "bucket" / "run")
        self.staging = folder / "state" / "staged"
        self.waited: list[float] = []
        clean(self.staging)

    def published(self, version: int = 1) -> ListedCommit:
        return self.trainer.read(self.trainer.publish(version).commit_key)

    def file(self, listed: ListedCommit, name: str) -> Path:
        return next(self.trainer.run_dir / f.key for f in listed.commit.files if f.name == name)

    def stage(self, listed: ListedCommit, max_rank: int = 8) -> StagedAdapter:
        return stage(
            self.trainer.run_dir,
            listed.commit,
            self.staging,
            max_rank=max_rank,
            wait=self.waited.append,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_staged_adapter_is_whole_private_and_loadable(world: World) -> None:
    listed = world.published()
    result = world.stage(listed)
    assert result.path == world.staging / listed.adapter.digest
    assert result.total_bytes == listed.commit.total_bytes
    assert result.phases_s.keys() == {"read", "check", "sync"}
    assert load(result.path, max_rank=8)
    assert mode(world.staging) == mode(result.path) == 0o700
    assert {mode(file) for file in result.path.iterdir()} == {0o600}
    assert staged(world.staging) == {listed.adapter.digest}


def test_what_is_staged_is_reused_without_the_bucket(world: World) -> None:
    listed = world.published()
    first = world.stage(listed)
    world.trainer.run_dir.rename(world.trainer.run_dir.with_name("away"))
    again = world.stage(listed)
    assert again.path == first.path
    assert again.phases_s.keys() == {"check"}
    with pytest.raises(AdapterRefusedError, match="vLLM was started for 4"):
        world.stage(listed, max_rank=4)


def test_a_staged_folder_that_rotted_is_staged_again(world: World) -> None:
    listed = world.published()
    path = world.stage(listed).path
    (path / WEIGHTS).write_bytes(b"rot")
    world.stage(listed)
    assert load(path, max_rank=8)
    (path / CONFIG).unlink()
    world.stage(listed)
    assert load(path, max_rank=8)


def test_leftovers_of_a_crash_go_and_whole_folders_stay(world: World) -> None:
    listed = world.published()
    world.stage(listed)
    write_adapter(world.staging / ".tmp-crashed")
    (world.staging / "lost+found").mkdir()
    assert clean(world.staging) == {listed.adapter.digest}
    assert not (world.staging / ".tmp-crashed").exists()


def test_remove(world: World) -> None:
    listed = world.published()
    world.stage(listed)
    remove(world.staging, listed.adapter.digest)
    remove(world.staging, listed.adapter.digest)
    assert list(world.staging.iterdir()) == []
    with pytest.raises(ValueError, match="is not a digest"):
        remove(world.staging, "../staged")


def damaged(data: bytes) -> list[bytes]:
    return [data[:-1], data + b"x", b"x" + data[1:], b""]


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_damaged_files_are_refused_and_leave_nothing(world: World, name: str) -> None:
    listed = world.published()
    path = world.file(listed, name)
    whole = path.read_bytes()
    for data in damaged(whole):
        path.write_bytes(data)
        with pytest.raises(AdapterRefusedError, match=r"(bytes|sha256) of its commit") as caught:
            world.stage(listed)
        assert caught.value.where == str(path)
        assert list(world.staging.iterdir()) == []
    path.write_bytes(whole)
    assert world.stage(listed)


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/dev/null"])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_link_in_the_bucket_shows_nothing_of_the_host(
    world: World, name: str, target: str
) -> None:
    listed = world.published()
    path = world.file(listed, name)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(AdapterRefusedError, match=r"does not have the \d+ bytes of its commit"):
        world.stage(listed)
    assert list(world.staging.iterdir()) == []


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/dev/null"])
def test_a_link_in_a_commits_place_is_none(world: World, target: str) -> None:
    key = world.trainer.publish(1).commit_key
    path = world.trainer.run_dir / key
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(BucketUnavailableError, match="is cut"):
        world.trainer.read(key)


def test_a_replica_checks_the_lora_by_itself(world: World) -> None:
    listed = world.published()
    with pytest.raises(AdapterRefusedError, match="vLLM was started for 4"):
        world.stage(listed, max_rank=4)
    assert list(world.staging.iterdir()) == []


def test_late_data_is_waited_for(world: World) -> None:
    listed = world.published()
    path = world.file(listed, WEIGHTS)
    hidden = path.rename(path.with_name("hidden"))
    with pytest.raises(BucketUnavailableError, match="its commit is there and this file is not"):
        world.stage(listed)
    assert world.waited == [0.1, 0.4, 1.0]

    def appear(_: float) -> None:
        hidden.rename(path)

    assert stage(world.trainer.run_dir, listed.commit, world.staging, max_rank=8, wait=appear)


def test_missing_data_without_a_commit_was_pruned_if_there_is_a_newer_one(world: World) -> None:
    listed = world.published()
    (world.trainer.run_dir / listed.key).unlink()
    world.file(listed, WEIGHTS).unlink()
    with pytest.raises(BucketUnavailableError, match="nor any newer"):
        world.stage(listed)
    world.published(2)
    with pytest.raises(AdapterRefusedError, match="was pruned"):
        world.stage(listed)


def fail_opens(monkeypatch: pytest.MonkeyPatch, below: Path, number: int, times: int) -> None:
    """Opening a bucket file fails, as when an object was replaced or the mount is in trouble."""
    real = Path.open
    left = [times]

    def failing(self: Path, *args: object, **options: object) -> object:
        if self.is_relative_to(below) and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", failing)


def test_a_read_that_fails_is_started_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = world.published()
    fail_opens(monkeypatch, world.trainer.run_dir, errno.ESTALE, 2)
    assert world.stage(listed)
    assert world.waited == [0.1, 0.4]


def test_lasting_trouble_is_the_buckets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = world.published()
    fail_opens(monkeypatch, world.trainer.run_dir, errno.EIO, 99)
    with pytest.raises(BucketUnavailableError, match="EIO"):
        world.stage(listed)
    world.waited.clear()
    fail_opens(monkeypatch, world.trainer.run_dir, errno.ENOTCONN, 99)
    with pytest.raises(BucketUnavailableError, match="the mount is dead"):
        world.stage(listed)
    assert world.waited == []


def test_a_local_disk_that_fails_is_not_blamed_on_the_bucket(world: World) -> None:
    listed = world.published()
    world.staging.rmdir()
    with pytest.raises(StoreError, match="cannot stage an adapter") as caught:
        world.stage(listed)
    assert caught.value.where == str(world.staging)
    assert not isinstance(caught.value, BucketUnavailableError)
