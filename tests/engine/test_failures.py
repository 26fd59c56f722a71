"""Errors of a run, each told with what to do about it."""

from __future__ import annotations

import errno
import os
import subprocess  # noqa: TID251 - mounts a small disk
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from asyncgrpo_engine.failures import explain  # noqa: E402
from asyncgrpo_engine.job import Job  # noqa: E402


def job(folder: str | Path = "/out") -> Job:
    return Job(model="m", output_dir=str(folder), gateway="http://127.0.0.1:9")


def failed_worker(text: str) -> Exception:
    """As TRL raises it: the rollout process's error is a text below its own."""
    try:
        raise RuntimeError("Rollout worker child has failed.") from RuntimeError(text)
    except RuntimeError as error:
        return error


def test_a_reward_that_failed_in_the_rollout_process() -> None:
    text = "RewardError: m:f returned None; return a list\nTraceback (most recent call last):\n ..."
    problem = explain(failed_worker(text), job())
    assert problem.what == "m:f returned None; return a list"
    assert problem.where == "train.rewards"


def test_anything_else_that_failed_there() -> None:
    problem = explain(failed_worker("KeyError: 'x'\nTraceback (most recent call last):"), job())
    assert problem.what == "KeyError: 'x'"
    assert problem.where == "TRL's rollout process"


def test_a_gpu_out_of_memory() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    problem = explain(error, job())
    assert problem.what == (
        "the GPU is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "train.token_budget" in problem.fix


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be reported later",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_gpu_out_of_memory_in_the_words_of_cuda(text: str) -> None:
    problem = explain(RuntimeError(text), job())
    assert problem.what == f"the GPU is out of memory: {text.splitlines()[0]}"


def test_what_is_wrong_elsewhere_is_not_laid_on_the_output_folder() -> None:
    for name in ("/models/base/config.json", b"/models/base/config.json"):
        problem = explain(PermissionError(errno.EACCES, os.strerror(errno.EACCES), name), job())
        assert (problem.where, "/models/base/config.json" in problem.what) == ("training", True)
    problem = explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x"), job())
    assert (problem.what, problem.where) == ("the disk is full", "/tmp/x")


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the disk is read-only"),
        (errno.EACCES, "the folder may not be written"),
    ],
)
def test_disks(number: int, what: str) -> None:
    problem = explain(OSError(number, os.strerror(number), "/out/checkpoint-5/x"), job())
    assert problem.what == what
    assert problem.where == "train.output_dir /out/checkpoint-5/x"
    assert problem.fix


def test_what_is_not_known_is_told_by_its_type() -> None:
    assert explain(ValueError("odd\nmore"), job()).what == "ValueError: odd"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_disk_that_is_full_while_saving(small_disk: Path, save: Any) -> None:
    with pytest.raises(Exception) as caught:
        save({"w": torch.zeros(100_000)}, small_disk / "weights")
    assert explain(caught.value, job(small_disk)).what == "the disk is full"
