import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.store.bucket import commit_folders
from asyncgrpo_agent.store.watch import Folders, watch_commits
from fakes.bucket import ATTEMPT, FakeTrainer

PATIENCE_S = 5.0


class Wakes:
    """Counts wake-ups; `next` waits for one that comes after the call."""

    def __init__(self) -> None:
        self.count = 0
        self._event = trio.Event()

    def changed(self) -> None:
        self.count += 1
        self._event.set()
        self._event = trio.Event()

    async def next(self) -> None:
        with trio.fail_after(PATIENCE_S):
            await self._event.wait()

    async def quiet(self, quiet_s: float = 0.15) -> None:
        """Until nothing has happened for a while: a watcher that has just begun tells so."""
        while True:
            before = self.count
            with trio.move_on_after(quiet_s):
                await self.next()
            if self.count == before:
                return


@asynccontextmanager
async def watched(
    folders: Folders, *, remote: bool = False, timer_s: float = 60.0
) -> AsyncIterator[Wakes]:
    wakes = Wakes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                watch_commits,
                folders,
                remote=remote,
                poll_s=0.0,
                changed=wakes.changed,
                timer_s=timer_s,
            )
        )
        await wakes.next()
        yield wakes
        nursery.cancel_scope.cancel()


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    return FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")


def folders_of(trainer: FakeTrainer) -> Folders:
    return lambda: commit_folders(trainer.run_dir, ATTEMPT)


async def test_a_commit_on_a_local_disk_wakes_at_once(trainer: FakeTrainer) -> None:
    trainer.publish(0)
    async with watched(folders_of(trainer)) as wakes:
        await wakes.quiet()
        local = trainer.save(1)
        trainer.publish(1, local)
        began = trio.current_time()
        await wakes.next()
        assert trio.current_time() - began < 0.5  # about 0.03 s on an idle machine
        assert len(trainer.keys()) == 2


async def test_folders_that_come_later_are_followed(trainer: FakeTrainer) -> None:
    async with watched(folders_of(trainer)) as wakes:
        await wakes.quiet()
        for folder in commit_folders(trainer.run_dir, ATTEMPT)[:1]:
            assert folder == trainer.run_dir.parent
        for version in (0, 1, 500, 501):
            trainer.publish(version)
            await wakes.next()
            await wakes.quiet()


async def test_a_mount_is_polled(trainer: FakeTrainer) -> None:
    trainer.publish(0)
    async with watched(folders_of(trainer), remote=True) as wakes:
        trainer.publish(1)
        await wakes.next()


async def test_failures_wake_and_are_tried_again(trainer: FakeTrainer) -> None:
    root = trainer.run_dir.parent
    root.rmdir()
    async with watched(folders_of(trainer)) as wakes:
        before = wakes.count
        root.mkdir()
        await wakes.next()
        assert wakes.count > before


async def test_a_folder_that_was_replaced_is_watched_anew(
    trainer: FakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "asyncgrpo_agent.store.watch")
    trainer.publish(0)
    async with watched(folders_of(trainer), timer_s=0.1) as wakes:
        trainer.run_dir.rename(trainer.run_dir.with_name("away"))
        trainer.publish(0, trainer.save(1))
        with trio.fail_after(PATIENCE_S):
            while caplog.messages.count("watch.started") < 2:
                await wakes.next()


async def test_a_hung_mount_stops_neither_the_loop_nor_the_timer() -> None:
    release = threading.Event()

    def hang() -> list[Path]:
        release.wait()
        return []

    async with watched(hang, timer_s=0.05) as wakes:
        await wakes.next()
    release.set()


async def test_the_timer_does_not_depend_on_the_watcher(trainer: FakeTrainer) -> None:
    async with watched(folders_of(trainer), timer_s=0.05) as wakes:
        for _ in range(3):
            await wakes.next()
