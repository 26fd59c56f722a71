"""What each run has cost so far, in `<state>/proxy/usage.json`: a proxy that restarts counts on.

Nothing but numbers for people depends on it. So a file that does not parse is set aside, not fatal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.core.usage import Usage
from asyncgrpo_agent.store import private_files

ASIDE: Final = ".damaged"

_decoder = msgspec.json.Decoder(dict[str, Usage])


def path_of(state_dir: Path) -> Path:
    return state_dir / "proxy" / "usage.json"


def read(path: Path) -> tuple[dict[str, Usage], str]:
    """By run, and why a file that was there could not be used; that one is renamed to `ASIDE`."""
    try:
        return _decoder.decode(path.read_bytes()), ""
    except FileNotFoundError:
        return {}, ""
    except msgspec.MsgspecError as error:
        path.replace(path.with_name(path.name + ASIDE))
        return {}, f"does not parse: {error}"
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"


def encode(usages: dict[str, Usage]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(usages), indent=1) + b"\n"


def write(path: Path, content: bytes) -> None:
    """Raises OSError."""
    private_files.private_folder(path.parent)
    private_files.write(path, content)
