"""What a run has ended with: written as versions are, and never taken for one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncgrpo_agent.core.commits import RESULTS
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.store.bucket import list_commits, list_results, read_commit
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.staging import stage
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer
from fakes.strict_mount import StrictBucket


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    return FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")


def test_a_result_is_a_plain_folder_of_its_own(trainer: FakeTrainer, tmp_path: Path) -> None:
    written = trainer.publish(500, shelf=RESULTS)
    assert written.folder == f"final/{ATTEMPT}/s000500"
    saved = trainer.folder / "v500"
    for path in (trainer.run_dir / written.folder).iterdir():
        assert path.read_bytes() == (saved / path.name).read_bytes()
    assert list_commits(trainer.run_dir, ATTEMPT, -1) == []
    (key,) = list_results(Listing(trainer.run_dir))
    listed = read_commit(trainer.run_dir, key, run="run", public_key=PUBLIC_KEY, shelf=RESULTS)
    (tmp_path / "staging").mkdir()
    staged = stage(trainer.run_dir, listed.commit, tmp_path / "staging", max_rank=8)
    assert staged.digest == written.adapter.digest
    shutil.rmtree(staged.path)
    (trainer.run_dir / written.folder / "adapter_model.safetensors").unlink()
    with pytest.raises(BucketUnavailableError, match="this file is not"):
        stage(
            trainer.run_dir,
            listed.commit,
            tmp_path / "staging",
            max_rank=8,
            wait=lambda _seconds: None,
        )


def test_its_commit_passes_for_no_version(trainer: FakeTrainer) -> None:
    written = trainer.publish(7, shelf=RESULTS)
    forged = trainer.run_dir / "commits" / ATTEMPT / "000000" / "v000007.toml"
    forged.parent.mkdir(parents=True)
    shutil.copyfile(trainer.run_dir / written.commit_key, forged)
    (key,) = list_commits(trainer.run_dir, ATTEMPT, -1)
    with pytest.raises(AdapterRefusedError, match="not signed with the run"):
        trainer.read(key)


def test_a_name_that_failed_is_not_used_again(tmp_path: Path) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer") as mounted:
        trainer = FakeTrainer(tmp_path / "local", mounted.path / "run")
        mounted.fail("write", 5, pattern="*s000009/*")
        written = trainer.publish(9, shelf=RESULTS)
        assert written.folder == f"final/{ATTEMPT}/s000009-r1"
        assert list_results(Listing(trainer.run_dir)) == [written.commit_key]
