from pathlib import Path

import pytest

from asyncgrpo_agent.store.bucket import list_commits
from asyncgrpo_agent.store.heartbeat import Heartbeat
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.staging import clean, stage
from fakes.bucket import ATTEMPT, FakeTrainer


class Counted(Heartbeat):
    def __init__(self) -> None:
        self.beats: list[int] = []
        self.pauses: list[int] = []

    def beat(self, size_bytes: int) -> None:
        self.beats.append(size_bytes)

    def pause(self, size_bytes: int) -> None:
        self.pauses.append(size_bytes)


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    return FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")


def test_every_chunk_and_every_sync_of_a_long_call_is_told(
    trainer: FakeTrainer, tmp_path: Path
) -> None:
    heart = Counted()
    local = trainer.save(0, hidden=40_000)  # 2.5 MB
    published = trainer.publish(0, local, heartbeat=heart)
    assert sum(heart.beats) == 2 * published.total_bytes  # hashed, then copied
    assert len(heart.beats) >= 6
    assert sum(heart.pauses) > 2 * published.total_bytes  # sync and close, also of the commit

    commit = trainer.read(published.commit_key).commit
    clean(tmp_path / "staged")
    for pauses in (published.total_bytes, 0):  # copied, then only verified again
        heart = Counted()
        stage(trainer.run_dir, commit, tmp_path / "staged", max_rank=8, heartbeat=heart)
        assert sum(heart.beats) == published.total_bytes
        assert sum(heart.pauses) == pauses


def test_every_listing_is_told(trainer: FakeTrainer) -> None:
    trainer.publish(0)
    heart = Counted()
    assert list_commits(trainer.run_dir, ATTEMPT, -1, listing=Listing(trainer.run_dir, heart))
    assert len(heart.beats) >= 3
