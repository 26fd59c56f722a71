"""What this host knows of each model from a hub: `<state>/models/<owner>--<name>@<revision>.json`.

A model that was loaded once is used again without asking the hub, if all of its files still lie
there. While one is being loaded, doctor reads here how far it has come.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from asyncgrpo_agent.store import private_files


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """`folder` is empty until the model is whole."""

    id: str
    commit: str = ""
    folder: str = ""
    files: dict[str, int] = {}
    bytes: int = 0
    of_bytes: int = 0
    reason: str = ""  # why it does not go on

    @property
    def is_here(self) -> bool:
        """Whether every file of it lies there, in its size."""
        return bool(self.folder) and all(
            _size(Path(self.folder, name)) == size for name, size in self.files.items()
        )


def path_of(state_dir: Path, model: str, revision: str) -> Path:
    name = re.sub(r"[^\w.-]", "-", f"{model.replace('/', '--')}@{revision}")
    return state_dir / "models" / f"{name}.json"


def of_model(state_dir: Path, model: str) -> list[Download]:
    """What is known of all its revisions, the newest first."""
    files = (state_dir / "models").glob(f"{path_of(state_dir, model, '').stem}*.json")
    known = [(path.stat().st_mtime_ns, read(path)) for path in files]
    known.sort(key=lambda one: one[0], reverse=True)
    return [download for _, download in known if download is not None and download.id == model]


def read(path: Path) -> Download | None:
    """None if nothing, or nothing sensible, is written there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Download)
    except (OSError, msgspec.MsgspecError):
        return None


def write(path: Path, download: Download) -> None:
    """Raises OSError."""
    private_files.private_folder(path.parent)
    private_files.write(path, msgspec.json.format(msgspec.json.encode(download), indent=1) + b"\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
