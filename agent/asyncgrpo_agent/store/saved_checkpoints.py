"""The checkpoints that TRL has on local disk: which is the newest one that is whole.

This module alone knows how transformers writes them: `checkpoint-N/`, in it the model, then the
optimizer, scheduler and random states, and `trainer_state.json` last, in place. So a folder is
whole once that file is JSON that names step N. Other ranks may still write their random state then,
so whoever asks waits for the folder to be quiet, or for the next step. Never writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent.errors import AdapterRefusedError
from asyncgrpo_agent.store.checkpoints import Looks, look

_STATE_FILE: Final = "trainer_state.json"
_FOLDER_RE: Final = re.compile(r"checkpoint-(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """A whole checkpoint; `looks` differ as soon as anything in it changes."""

    step: int
    folder: Path
    looks: Looks


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def on_disk(output_dir: Path) -> dict[int, Path]:
    """All checkpoint folders by step, whole or not; newest first."""
    try:
        names = [entry.name for entry in output_dir.iterdir()]
    except FileNotFoundError:  # TRL makes it with the first one
        return {}
    matches = [match for name in names if (match := _FOLDER_RE.fullmatch(name))]
    found = {int(match[1]): output_dir / match[0] for match in matches}
    return dict(sorted(found.items(), reverse=True))


def newest(
    output_dir: Path, *, after_step: int, known: Mapping[int, Looks], below_step: int | None = None
) -> LocalCheckpoint | None:
    """The newest whole checkpoint between these steps that is not `known` as it is."""
    for step, folder in on_disk(output_dir).items():
        if step <= after_step:
            return None
        if below_step is not None and step >= below_step:
            continue
        looks = looks_of(folder)
        if looks and known.get(step) != looks and _is_whole(folder / _STATE_FILE, step):
            return LocalCheckpoint(step=step, folder=folder, looks=looks)
    return None


def looks_of(folder: Path) -> Looks:
    """None of a folder that is being removed, or holds what cannot be copied."""
    try:
        return look(folder)
    except (FileNotFoundError, NotADirectoryError, AdapterRefusedError):
        return {}


def _is_whole(state_file: Path, step: int) -> bool:
    try:
        state = json.loads(state_file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("global_step") == step
