"""What ended a training run, in the words that its user needs: what, where, and what to do.

TRL's rollout process fails far from the trainer, which gets its error as text; a GPU or a disk that
is full shows as whatever PyTorch or safetensors make of it. Anything not known here is told by its
type and first line, and the log has the rest.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncgrpo_engine import trl_names
from asyncgrpo_engine.job import Job
from asyncgrpo_engine.problems import Problem, from_exception

_LEAST_FREE_BYTES: Final = 1 << 20
_ROOM: Final = (
    "free some space, or set train.output_dir to a larger disk; save_total_limit keeps less"
)
_DISKS: Final = {
    errno.ENOSPC: ("the disk is full", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EROFS: ("the disk is read-only", "set train.output_dir to a folder that can be written"),
    errno.EACCES: ("the folder may not be written", "give the agent's user write permission"),
}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER: Final = "inline_container.cc"
_NO_ROOM: Final = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_OUT_OF_MEMORY: Final = (
    "lower train.token_budget (or train.per_device_train_batch_size), keep "
    'train.gradient_checkpointing = true, or set train.dtype = "bfloat16"'
)


def explain(error: BaseException, job: Job) -> Problem:
    """The cause of `error`, as far as it is one that users can mend."""
    chain = list(_chain(error))
    for one in chain:
        found = _out_of_memory(one) or _disk(one, job) or _of_rollouts(one)
        if found is not None:
            return found
    return from_exception(error, where="training")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _out_of_memory(error: BaseException) -> Problem | None:
    """torch's own type, whose text differs by device, or what CUDA says by itself."""
    text = str(error)
    if type(error).__name__ != "OutOfMemoryError" and not any(word in text for word in _NO_ROOM):
        return None
    first = text.partition("\n")[0]
    return Problem(what=f"the GPU is out of memory: {first}", where="train", fix=_OUT_OF_MEMORY)


def _disk(error: BaseException, job: Job) -> Problem | None:
    number = error.errno if isinstance(error, OSError) else None
    path = _path_of(error) or job.output_dir
    if number is None and (named := _OS_ERROR.search(str(error))):  # safetensors, in Rust's words
        number = int(named[1])
    if number is None and _TORCH_WRITER in str(error) and _is_full(job.output_dir):
        number = errno.ENOSPC
    if number not in _DISKS:
        return None
    what, fix = _DISKS[number]
    if Path(path).is_relative_to(job.output_dir):
        return Problem(what=what, where=f"train.output_dir {path}", fix=fix)
    if number in _FULL:  # a cache, or /tmp
        return Problem(what=what, where=path, fix="free some space there")
    return None  # the error names what could not be read


def _path_of(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else ""


def _is_full(folder: str) -> bool:
    """torch.save tells nobody why it could not write."""
    try:
        return shutil.disk_usage(Path(folder)).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def _of_rollouts(error: BaseException) -> Problem | None:
    """The text of what failed in TRL's rollout process."""
    text = trl_names.rollout_failure(error)
    if text is None:
        return None
    kind, _, message = text.partition(": ")
    if kind == "RewardError":
        return Problem(what=message, where="train.rewards", fix="correct it and start again")
    return Problem(what=text, where="TRL's rollout process", fix="see its traceback in train.log")
