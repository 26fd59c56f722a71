"""What is asked from outside of a run: which runs there are, all of its versions, no signature."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.core.commits import decode
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.store.bucket import list_commits, list_runs, read_commit
from fakes.bucket import ATTEMPT, FakeTrainer

OTHER_KEY = bytes(32)


def test_runs_are_folders_that_hold_commits(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == []
    for run in ("zeta", "alpha"):
        FakeTrainer(tmp_path / ".local" / run, tmp_path / run).publish(0)
    (tmp_path / "begun" / "adapters").mkdir(parents=True)
    (tmp_path / "Not a run" / "commits").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert list_runs(tmp_path) == ["alpha", "zeta"]
    with pytest.raises(BucketUnavailableError, match="ENOENT"):
        list_runs(tmp_path / "gone")


def test_the_whole_of_a_long_run(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "run")
    keys = [trainer.publish(version).commit_key for version in (1, 700, 1200)][::-1]
    assert list_commits(trainer.run_dir, ATTEMPT, -1) == keys[:2]
    assert list_commits(trainer.run_dir, ATTEMPT, -1, whole=True) == keys
    assert list_commits(trainer.run_dir, ATTEMPT, 700, whole=True) == keys[:1]


def test_without_a_key_only_the_signature_is_not_checked(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "run")
    key = trainer.publish(1, private_key=OTHER_KEY).commit_key
    with pytest.raises(AdapterRefusedError, match="not signed with the run's key"):
        trainer.read(key)
    read = read_commit(trainer.run_dir, key, run="run", public_key=None)
    assert (read.key, read.commit.version) == (key, 1)
    data = (trainer.run_dir / key).read_bytes()
    with pytest.raises(AdapterRefusedError, match="its digest does not match"):
        decode(data.replace(b"base_model", b"best_model", 1), run="run", public_key=None)
    with pytest.raises(AdapterRefusedError, match="belongs to run"):
        decode(data, run="other", public_key=None)
