"""This very program, frozen or not, as a child that is a part of it. Starts nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import asyncgrpo_agent
from asyncgrpo_agent.procs.environment import child_environment


def worker_command(*arguments: str) -> list[str]:
    """Never looks for modules in the working directory, which may be anywhere."""
    program = [sys.executable] if _is_frozen() else [sys.executable, "-P", "-m", "asyncgrpo_agent"]
    return [*program, *arguments]


def worker_environment() -> dict[str, str]:
    additions = {}
    if not _is_frozen():
        # The program is where this one was found, which may be no place that Python looks at.
        home = str(Path(asyncgrpo_agent.__file__).resolve().parents[1])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        additions["PYTHONPATH"] = os.pathsep.join(paths)
    return child_environment(os.environ, additions, frozen=_is_frozen(), kind="worker")


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))
