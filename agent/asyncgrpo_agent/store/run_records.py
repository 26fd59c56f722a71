"""Sealed records of runs, as files of the state folder; see `core.run_record`.

<state>/proxy/records/<run>.toml      what trainers have said, for a proxy that restarts
<state>/trainer/<run>/record.toml     what this host's trainer has said
"""

from __future__ import annotations

from pathlib import Path

from asyncgrpo_agent.store import private_files


def of_proxy(state_dir: Path, run: str) -> Path:
    return state_dir / "proxy" / "records" / f"{run}.toml"


def of_trainer(state_dir: Path, run: str) -> Path:
    return state_dir / "trainer" / run / "record.toml"


def read(path: Path) -> bytes:
    """b"" if there is none. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def write(path: Path, data: bytes) -> None:
    """Raises OSError."""
    private_files.private_folder(path.parent)
    private_files.write(path, data)
