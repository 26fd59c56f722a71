import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from asyncgrpo_agent.store.bucket import commit_folders
from asyncgrpo_agent.store.watch import Folders, watch_commits
from fakes.bucket import ATTEMPT, FakeTrainer

PATIENCE_S = 5.0


class Wakes:
    """Counts wake-ups; `next` waits for one that comes after the call."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def changed(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def next(self) -> None:
        assert self._comes(PATIENCE_S)

    def quiet(self, quiet_s: float = 0.15) -> None:
        """Until nothing has happened for a while: a watcher that has just begun tells so."""
        while self._comes(quiet_s):
            pass

    def _comes(self, timeout_s: float) -> bool:
        with self._changed:
            before = self.count
            return self._changed.wait_for(lambda: self.count > before, timeout_s)


@contextmanager
def watched(folders: Folders, *, look_s: float = 60.0) -> Iterator[Wakes]:
    wakes, stop = Wakes(), threading.Event()
    options = {"changed": wakes.changed, "stop": stop, "look_s": look_s}
    thread = threading.Thread(target=watch_commits, args=(folders,), kwargs=options, daemon=True)
    thread.start()
    wakes.quiet()
    yield wakes
    stop.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    return FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")


def folders_of(trainer: FakeTrainer) -> Folders:
    return lambda: commit_folders(trainer.run_dir, ATTEMPT)


def test_a_commit_on_a_local_disk_wakes_at_once(trainer: FakeTrainer) -> None:
    trainer.publish(0)
    with watched(folders_of(trainer)) as wakes:
        local, before = trainer.save(1), wakes.count
        began = monotonic()
        trainer.publish(1, local)
        while wakes.count == before:
            wakes.quiet(0.02)
            assert monotonic() - began < 1.0  # about 0.03 s on an idle machine
        assert len(trainer.keys()) == 2


def test_folders_that_come_later_are_followed(trainer: FakeTrainer) -> None:
    with watched(folders_of(trainer)) as wakes:
        assert commit_folders(trainer.run_dir, ATTEMPT) == [trainer.run_dir.parent]
        for version in (0, 1, 500, 501):
            before = wakes.count
            trainer.publish(version)
            wakes.quiet()
            assert wakes.count > before


def test_failures_wake_and_are_tried_again(trainer: FakeTrainer) -> None:
    root = trainer.run_dir.parent
    root.rmdir()
    with watched(folders_of(trainer)) as wakes:
        assert wakes.count == 1
        root.mkdir()
        wakes.next()


def test_a_folder_that_was_replaced_is_watched_anew(
    trainer: FakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "asyncgrpo_agent.store.watch")
    trainer.publish(0)
    with watched(folders_of(trainer), look_s=0.1) as wakes:
        trainer.run_dir.rename(trainer.run_dir.with_name("away"))
        trainer.publish(0, trainer.save(1))
        deadline = monotonic() + PATIENCE_S
        while caplog.messages.count("watch.started") < 2:
            assert monotonic() < deadline
            wakes.quiet(0.05)
