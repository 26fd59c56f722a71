"""The engine's Python as a child that loads a model from its hub, and what it says.

The agent has no client of model hubs: the engine's Python does, and it alone is given the token.
The lines that it writes are described in `asyncgrpo_engine.download`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.procs.trl import package_folder

MODULE: Final = "asyncgrpo_engine.download"


class Progress(msgspec.Struct, frozen=True):
    commit: str
    bytes: int
    of_bytes: int


class Loaded(msgspec.Struct, frozen=True):
    """A model that is whole on this host; `files` are their sizes in bytes by name."""

    commit: str
    folder: str
    files: dict[str, int]


class _Place(msgspec.Struct, frozen=True):
    commit: str
    folder: str


class _Line(msgspec.Struct, frozen=True):
    progress: Progress | None = None
    files: dict[str, int] | None = None
    model: _Place | None = None


def download_command(
    python: str, model: str, revision: str, *, trust_remote_code: bool, scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line and what it adds to the environment."""
    argv = [python, "-m", MODULE, model, revision]
    additions = {
        "PYTHONPATH": str(package_folder(scratch)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return [*argv, *(["--trust-remote-code"] if trust_remote_code else [])], additions


def hub_home(home: Path, state_dir: Path) -> dict[str, str]:
    """Where models go if nobody says so (HF_HOME): the hub's own default, so that what is there
    already is found; for users without a home of their own, as services are, below the state."""
    return {} if os.access(home, os.W_OK) else {"HF_HOME": str(state_dir / "cache/huggingface")}


class Reader:
    """Takes the child's lines, one after the other; what it has loaded is known at the end."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None
        self._files: dict[str, int] = {}

    def take(self, line: str) -> Progress | None:
        """How far it has come, if the line says that. What others print is passed over."""
        if not line.startswith("{"):
            return None
        try:
            said = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError:
            return None
        self._files |= said.files or {}
        if said.model is not None:
            self.loaded = Loaded(said.model.commit, said.model.folder, self._files)
        return said.progress
