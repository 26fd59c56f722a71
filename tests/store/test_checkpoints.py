"""Checkpoints through a bucket: whole or not at all, in both directions."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.core.checkpoints import CheckpointKey
from asyncgrpo_agent.errors import (
    AdapterDamagedError,
    AdapterRefusedError,
    BucketUnavailableError,
    StoreError,
)
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.store.checkpoints import (
    PublishedCheckpoint,
    SavedCheckpoint,
    list_checkpoints,
    list_torn_checkpoints,
    look,
    prune_checkpoint,
    publish_checkpoint,
    publishing,
    read_checkpoint,
    restore,
)
from asyncgrpo_agent.store.listing import Listing
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY
from fakes.checkpoints import save_checkpoint
from fakes.strict_mount import Host, StrictBucket
from fakes.strict_mount_control import Operation


class World:
    """A trainer's output folder, and the bucket that it has a copy in."""

    def __init__(self, folder: Path, bucket: Path) -> None:
        self.output = folder / "output"
        self.run_dir = bucket / "run"
        self.restored = folder / "elsewhere" / "checkpoint"

    def saved(self, step: int = 10, size_bytes: int = 3_000_000) -> SavedCheckpoint:
        folder = save_checkpoint(self.output, step, size_bytes)
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "shard 0").write_bytes(b"x" * 7)
        (folder / "empty").touch()
        return self.described(folder, step)

    def described(self, folder: Path, step: int) -> SavedCheckpoint:
        return SavedCheckpoint(
            local_dir=folder,
            run="run",
            attempt=ATTEMPT,
            step=step,
            base_model="base",
            base_model_digest="ab" * 32,
            private_key=PRIVATE_KEY,
            now_unix_s=1.7e9,
        )

    def publish(self, step: int = 10) -> PublishedCheckpoint:
        return publish_checkpoint(self.saved(step), self.run_dir)

    def manifests(self) -> list[CheckpointKey]:
        return list_checkpoints(Listing(self.run_dir)).get(ATTEMPT, [])

    def whole(self) -> list[int]:
        """Steps whose manifest reads back; a name alone may be listed while it is written."""
        found = []
        for key in self.manifests():
            with suppress(StoreError):
                read_checkpoint(self.run_dir, key, run="run", public_key=PUBLIC_KEY)
                found.append(key.step)
        return found

    def torn(self) -> list[CheckpointKey]:
        return list_torn_checkpoints(Listing(self.run_dir)).get(ATTEMPT, [])

    def restore(self, key: CheckpointKey | None = None) -> None:
        newest = key or self.manifests()[-1]
        checkpoint = read_checkpoint(self.run_dir, newest, run="run", public_key=PUBLIC_KEY)
        restore(self.run_dir, checkpoint, self.restored, wait=lambda _: None)

    def nothing_restored(self) -> bool:
        return list(self.restored.parent.iterdir()) == []


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "bucket").mkdir()
    return World(tmp_path, tmp_path / "bucket")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Host]:
    with StrictBucket(tmp_path / "s3").mount("trainer", allow_delete=True) as host:
        yield host


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_what_is_published_is_restored_byte_by_byte(world: World) -> None:
    published = world.publish()
    assert published.key == f"checkpoints/{ATTEMPT}/s000010.toml"
    assert published.phases_s.keys() == {"check", "copy", "commit"}
    assert [key.step for key in world.manifests()] == [10]
    world.restore()
    saved = contents(world.output / "checkpoint-10")
    assert contents(world.restored) == saved
    assert published.total_bytes == sum(map(len, saved.values()))
    assert {"deep/er/shard 0", "empty", "trainer_state.json"} < saved.keys()
    assert [path.name for path in world.restored.parent.iterdir()] == ["checkpoint"]


def test_on_a_mount_as_well(tmp_path: Path, mounted: Host) -> None:
    world = World(tmp_path, mounted.path)
    world.publish()
    world.restore()
    assert contents(world.restored) == contents(world.output / "checkpoint-10")


def test_it_does_not_exist_before_its_last_step(world: World) -> None:
    steps = publishing(world.saved(), world.run_dir)
    before = [world.whole() for _ in steps]
    assert len(before) > 10
    assert not any(before[:-1])
    assert world.whole() == [10]


def test_a_copy_that_was_given_up_leaves_what_no_listing_shows(world: World) -> None:
    saved = world.saved()
    steps = publishing(saved, world.run_dir)
    while not world.torn():
        next(steps)
    steps.close()
    assert world.manifests() == []
    assert [key.step for key in world.torn()] == [10]
    again = publish_checkpoint(saved, world.run_dir)
    assert again.key == f"checkpoints/{ATTEMPT}/s000010.toml"
    assert world.torn() == []
    world.restore()
    assert prune_checkpoint(Listing(world.run_dir), world.manifests()[0]) > len(
        contents(world.restored)
    )
    assert contents(world.run_dir) == {}


async def test_a_publisher_that_is_killed_half_way_leaves_nothing_that_lists(
    tmp_path: Path, mounted: Host
) -> None:
    world = World(tmp_path, mounted.path)
    saved = world.saved()
    async with BucketHost(str(mounted.path), "run", Agent()).running() as host:
        mounted.kill_caller("write", pattern="*optimizer.pt", skip=2)
        with pytest.raises(BucketUnavailableError, match="exit status -9"):
            await host.publish_checkpoint(saved, 60.0)
        mounted.release()
        with pytest.raises(BucketUnavailableError, match="was lost with its worker"):
            await host.continue_checkpoint(10, 60.0)
        assert await host.list_checkpoints() == {ATTEMPT: []}
        assert len((await host.list_torn_checkpoints())[ATTEMPT]) == 1
        progress = await host.publish_checkpoint(saved, 60.0)
        assert progress == await host.continue_checkpoint(10, 60.0)
        (key,) = (await host.list_checkpoints())[ATTEMPT]
        checkpoint = await host.read_checkpoint(key, run="run", public_key=PUBLIC_KEY)
        assert checkpoint.folder.endswith("s000010-r1")
        await host.restore_checkpoint(checkpoint, world.restored)
        assert contents(world.restored) == contents(saved.local_dir)
        assert await host.prune_checkpoint(key) > 0
        assert await host.list_checkpoints() == {}


STEPS: tuple[tuple[Operation, str], ...] = (
    ("mkdir", "*/checkpoints/*"),
    ("create", "*optimizer.pt"),
    ("open", "*optimizer.pt"),
    ("write", "*optimizer.pt"),
    ("fsync", "*optimizer.pt"),
    ("close", "*optimizer.pt"),
    ("create", "*.toml"),
    ("write", "*.toml"),
    ("fsync", "*.toml"),
    ("close", "*.toml"),
)


@pytest.mark.parametrize(("operation", "pattern"), STEPS)
def test_trouble_at_any_step_is_an_error_or_leads_to_another_name(
    operation: Operation, pattern: str, tmp_path: Path, mounted: Host
) -> None:
    world = World(tmp_path, mounted.path)
    mounted.fail(operation, errno.EIO, pattern=pattern)
    with pytest.raises(BucketUnavailableError, match="EIO"):
        world.publish(10)
    late = operation == "close" and pattern == "*.toml"  # after fsync the manifest is there
    assert bool(world.whole()) == late
    mounted.release()
    mounted.fail(operation, errno.EIO, pattern=pattern, times=1)
    world.publish(20)
    assert world.manifests()[-1].step == 20
    world.restore()
    assert contents(world.restored) == contents(world.output / "checkpoint-20")


@pytest.mark.parametrize("operation", ["open", "read", "readdir"])
def test_trouble_while_reading(operation: Operation, tmp_path: Path, mounted: Host) -> None:
    world = World(tmp_path, mounted.path)
    world.publish()
    key = world.manifests()[0]
    pattern = "*s000010" if operation == "readdir" else "*optimizer.pt"
    mounted.fail(operation, errno.EIO, pattern=pattern)
    with pytest.raises(BucketUnavailableError, match="EIO"):
        world.restore(key)
    assert world.nothing_restored()
    mounted.release()
    if operation != "readdir":
        mounted.fail(operation, errno.EIO, pattern=pattern, times=1)
    world.restore(key)
    assert contents(world.restored) == contents(world.output / "checkpoint-10")


@pytest.mark.parametrize("name", ["optimizer.pt", "deep/er/shard 0", "trainer_state.json"])
def test_a_flipped_byte_is_refused(world: World, name: str) -> None:
    world.publish()
    path = world.run_dir / "checkpoints" / ATTEMPT / "s000010" / name
    data = path.read_bytes()
    for wrong in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(AdapterRefusedError, match="of its commit"):
            world.restore()
        assert world.nothing_restored()


def test_a_missing_file_is_named(world: World) -> None:
    world.publish()
    (world.run_dir / "checkpoints" / ATTEMPT / "s000010" / "optimizer.pt").unlink()
    with pytest.raises(BucketUnavailableError, match=r"optimizer\.pt.*ENOENT"):
        world.restore()
    assert world.nothing_restored()


def test_manifests_that_are_cut_forged_or_copied(world: World) -> None:
    published = world.publish()
    path, key = world.run_dir / published.key, world.manifests()[0]
    copied = replace(key, step=11)
    (world.run_dir / copied.key).write_bytes(path.read_bytes())
    with pytest.raises(AdapterRefusedError, match="is a copy of the manifest of step 10"):
        world.restore(copied)
    with pytest.raises(AdapterRefusedError, match="not signed"):
        read_checkpoint(world.run_dir, key, run="run", public_key=PUBLIC_KEY[::-1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterDamagedError, match="is cut"):
        world.restore(key)


def test_a_target_that_exists_is_left_alone(world: World) -> None:
    world.publish()
    world.restored.mkdir(parents=True)
    with pytest.raises(StoreError, match="is there already"):
        world.restore()
    world.restored.rmdir()
    (world.restored.parent / ".tmp-checkpoint-crashed").mkdir()
    world.restore()
    assert [path.name for path in world.restored.parent.iterdir()] == ["checkpoint"]


# --- a folder that does not stand still --------------------------------------------------------


@pytest.mark.parametrize("what", ["a byte", "a new file", "a missing file", "all gone"])
def test_a_folder_that_changes_is_refused(world: World, what: str) -> None:
    saved = world.saved()
    steps = publishing(saved, world.run_dir)
    while not world.torn():
        next(steps)
    match what:
        case "a byte":
            (saved.local_dir / "optimizer.pt").write_bytes(b"y" * 3_000_000)
        case "a new file":
            (saved.local_dir / "late").touch()
        case "a missing file":
            (saved.local_dir / "scheduler.pt").unlink()
        case _:
            for path in sorted(saved.local_dir.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            saved.local_dir.rmdir()
    with pytest.raises(AdapterRefusedError, match="changed while it was copied"):
        list(steps)
    assert world.manifests() == []


def test_what_is_no_plain_file_is_refused(world: World) -> None:
    saved = world.saved()
    (saved.local_dir / "latest").symlink_to("/etc/passwd")
    with pytest.raises(AdapterRefusedError, match="is no plain file"):
        publish_checkpoint(saved, world.run_dir)
    assert not world.run_dir.exists()
    with pytest.raises(AdapterRefusedError, match="names 0 files"):
        publish_checkpoint(world.described(world.run_dir.parent, 1), world.run_dir)


def test_looks_tell_any_change(world: World) -> None:
    folder = world.saved().local_dir
    before = look(folder)
    assert look(folder) == before
    (folder / "empty").write_bytes(b"x")
    assert look(folder) != before


# --- removing --------------------------------------------------------------------------------


def test_of_two_manifests_of_a_step_the_last_takes_the_data_along(world: World) -> None:
    world.publish(10)
    publish_checkpoint(world.described(world.output / "checkpoint-10", 10), world.run_dir)
    first, second = world.manifests()
    listing = Listing(world.run_dir)
    assert prune_checkpoint(listing, first) == 1
    world.restore(second)
    assert prune_checkpoint(listing, second) > 8
    assert contents(world.run_dir) == {}
    assert prune_checkpoint(listing, second) == 0


def test_torn_data_is_removed_by_its_folder(world: World) -> None:
    published = world.publish(10)
    world.publish(20)
    (world.run_dir / published.key).unlink()
    (torn,) = world.torn()
    assert prune_checkpoint(Listing(world.run_dir), torn) > 8
    assert world.torn() == []
    world.restore()


async def test_other_calls_go_between_the_slices(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    world = World(tmp_path, tmp_path / "bucket")
    saved = world.saved()
    async with BucketHost(str(tmp_path / "bucket"), "run", Agent()).running() as host:
        progress, slices = await host.publish_checkpoint(saved, 0.0), 1
        while progress.published is None:
            await host.list_attempts()
            progress = await host.continue_checkpoint(10, 0.0)
            slices += 1
            await trio.lowlevel.checkpoint()
        assert slices > 10
        assert (await host.list_checkpoints())[ATTEMPT][0].step == 10
