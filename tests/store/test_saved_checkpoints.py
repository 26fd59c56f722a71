"""Which of TRL's checkpoints on local disk is the newest whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.store.saved_checkpoints import looks_of, newest, on_disk
from fakes.checkpoints import begin_checkpoint, finish_checkpoint, save_checkpoint


def step_of_newest(folder: Path, after_step: int = -1) -> int | None:
    found = newest(folder, after_step=after_step, known={})
    return None if found is None else found.step


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    assert step_of_newest(tmp_path / "none") is None
    for step in (90, 100, 20):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-200").touch()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".vllm_lora").mkdir()
    assert step_of_newest(tmp_path) == 100
    assert step_of_newest(tmp_path, after_step=100) is None
    assert list(on_disk(tmp_path)) == [200, 100, 90, 20]


@pytest.mark.parametrize("state", [None, "", '{"global_step": 2', '{"global_step": 19}', "[]"])
def test_one_that_is_being_written_does_not_count(tmp_path: Path, state: str | None) -> None:
    save_checkpoint(tmp_path, 10)
    folder = begin_checkpoint(tmp_path, 20)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    assert step_of_newest(tmp_path) == 10
    finish_checkpoint(folder, 20)
    assert step_of_newest(tmp_path) == 20


def test_what_is_known_counts_again_once_it_changes(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 20)
    save_checkpoint(tmp_path, 10)
    known = {20: looks_of(folder)}
    found = newest(tmp_path, after_step=-1, known=known)
    assert found is not None
    assert found.step == 10
    (folder / "rng_state_1.pth").touch()
    found = newest(tmp_path, after_step=-1, known=known)
    assert found is not None
    assert (found.step, found.folder) == (20, folder)


def test_a_folder_that_cannot_be_copied_is_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10)
    (save_checkpoint(tmp_path, 20) / "latest").symlink_to("model")
    assert step_of_newest(tmp_path) == 10
    assert looks_of(tmp_path / "gone") == {}
