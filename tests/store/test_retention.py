"""Versions leave the bucket whole, their commits first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncgrpo_agent.core.adapters import adapter_folder
from asyncgrpo_agent.errors import BucketUnavailableError, DeletionForbiddenError
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.retention import list_torn, list_versions, prune
from fakes.bucket import ATTEMPT, FakeTrainer


@pytest.fixture
def trainer(tmp_path: Path) -> FakeTrainer:
    root = tmp_path / "bucket"
    root.mkdir()
    return FakeTrainer(tmp_path / "local", root / "run")


def test_versions_are_those_with_a_commit(trainer: FakeTrainer) -> None:
    for version in (1, 2, 500):
        trainer.publish(version)
    torn = trainer.run_dir / adapter_folder(ATTEMPT, 3)
    torn.mkdir()
    other = trainer.run_dir / "adapters" / "a0002-0000"
    other.mkdir()
    assert list_versions(Listing(trainer.run_dir)) == {ATTEMPT: [1, 2, 500], "a0002-0000": []}


def test_an_empty_bucket_has_none(tmp_path: Path) -> None:
    assert list_versions(Listing(tmp_path / "run")) == {}


def test_a_version_goes_with_all_that_bears_its_number(trainer: FakeTrainer) -> None:
    trainer.publish(1)
    trainer.publish(2)
    torn = trainer.run_dir / adapter_folder(ATTEMPT, 1, retry=1)
    torn.mkdir()
    (torn / "adapter_model.safetensors").write_bytes(b"cut")
    assert prune(Listing(trainer.run_dir), ATTEMPT, 1) == 4
    assert list_versions(Listing(trainer.run_dir)) == {ATTEMPT: [2]}
    left = [path.name for path in (trainer.run_dir / "adapters" / ATTEMPT).iterdir()]
    assert left == ["v000002"]


def test_the_commit_goes_before_the_data(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish(1)
    gone: list[str] = []

    def unlink(path: Path) -> None:
        gone.append(path.name)
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    prune(Listing(trainer.run_dir), ATTEMPT, 1)
    assert gone == ["v000001.toml", "adapter_config.json", "adapter_model.safetensors"]


def test_what_a_cut_removal_left_is_torn_and_goes_the_next_time(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish(1)
    trainer.publish(2)

    def unlink(path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(5, "Input/output error", str(path))
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    listing = Listing(trainer.run_dir)
    with pytest.raises(BucketUnavailableError, match="EIO"):
        prune(listing, ATTEMPT, 1)
    monkeypatch.undo()
    assert list_versions(listing) == {ATTEMPT: [2]}
    assert list_torn(listing) == {ATTEMPT: [1]}
    assert prune(listing, ATTEMPT, 1) == 1
    assert list_torn(listing) == {ATTEMPT: []}


def test_an_emptied_commits_folder_goes_too(trainer: FakeTrainer) -> None:
    trainer.publish(1)
    trainer.publish(500)
    prune(Listing(trainer.run_dir), ATTEMPT, 1)
    folders = sorted(path.name for path in (trainer.run_dir / "commits" / ATTEMPT).iterdir())
    assert folders == ["000001"]


def test_what_is_gone_already_is_fine(trainer: FakeTrainer) -> None:
    trainer.publish(1)
    listing = Listing(trainer.run_dir)
    assert prune(listing, ATTEMPT, 1) == 3
    assert prune(listing, ATTEMPT, 1) == 0
    assert prune(listing, ATTEMPT, 99) == 0


def test_a_bucket_that_forbids_deletion_says_so(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish(1)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DeletionForbiddenError, match=r"--allow-delete.*bucket\.prune"):
        prune(Listing(trainer.run_dir), ATTEMPT, 1)
    monkeypatch.undo()
    assert list_versions(Listing(trainer.run_dir)) == {ATTEMPT: [1]}
