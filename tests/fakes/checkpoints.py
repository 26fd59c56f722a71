"""Checkpoint folders as transformers writes them: the same names in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from fakes.adapters import write_adapter


def save_checkpoint(output_dir: Path, step: int, size_bytes: int = 1000) -> Path:
    """All of one; `size_bytes` is the optimizer's share."""
    folder = begin_checkpoint(output_dir, step, size_bytes)
    finish_checkpoint(folder, step)
    return folder


def begin_checkpoint(output_dir: Path, step: int, size_bytes: int = 1000) -> Path:
    """All but the last file."""
    folder = write_adapter(output_dir / f"checkpoint-{step}", seed=step)
    random = Random(step)
    (folder / "optimizer.pt").write_bytes(random.randbytes(size_bytes))
    for name in ("scheduler.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(random.randbytes(100))
    return folder


def finish_checkpoint(folder: Path, step: int) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
