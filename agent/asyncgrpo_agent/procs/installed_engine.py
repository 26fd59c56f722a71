"""An engine that pip has installed: which Python of the PATH has it.

Blocking, for the time before the loop. Nothing of the engine is imported, which takes long.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from subprocess import DEVNULL, SubprocessError, run  # noqa: TID251 - see above
from typing import Final

from asyncgrpo_agent.procs.environment import child_environment

NAMES: Final = ("python3", "python")
_PATIENCE_S: Final = 20.0


def python_with(package: str) -> Path | None:
    """The first Python of the PATH that could import `package`."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None and _has(found, package):
            return Path(os.path.abspath(found))  # links stay: they tell Python its environment
    return None


def _has(python: str, package: str) -> bool:
    code = f"from importlib.util import find_spec; raise SystemExit(not find_spec({package!r}))"
    frozen = bool(getattr(sys, "frozen", False))
    env = child_environment(os.environ, {}, frozen=frozen, kind="tool")
    try:
        done = run(
            [python, "-I", "-B", "-c", code],
            env=env,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            timeout=_PATIENCE_S,
        )
    except (OSError, SubprocessError):
        return False
    return done.returncode == 0
