"""Agents that an agent starts: ordinary ones, from a file, each with a folder of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.procs import child


def share_of_cores(config: Config, sharers: int) -> dict[str, str]:
    """`engine.env` of engines that share a host's cores; what the user says goes first."""
    threads = max(1, len(os.sched_getaffinity(0)) // sharers)
    return {"OMP_NUM_THREADS": str(threads), **config.engine.env}


def write_config(config: Config, folder: Path, *changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """The file of a child whose state is in `folder`: `config` with `changes`, later ones first."""
    table = config.to_table()
    for change in changes:
        for section, keys in change.items():
            table[section] |= keys
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.touch(mode=0o600)
    path.write_text(tomli_w.dumps(msgspec.to_builtins(table)))
    return path


def agent_started(
    name: str,
    role: str,
    config_file: Path,
    *,
    log_file: Path,
    grace_s: float,
    additions: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> AbstractAsyncContextManager[child.Child]:
    """This very program once more; `additions` are variables of its environment."""
    return child.started(
        name,
        [*_agent_command(), "--role", role, "--config", str(config_file)],
        env=child.inherited(additions or {}, "agent"),
        log_file=log_file,
        grace_s=grace_s,
        on_line=on_line,
    )


def _agent_command() -> list[str]:
    """Frozen or not."""
    if getattr(sys, "frozen", False):
        return [sys.executable]
    return [sys.executable, "-m", "asyncgrpo_agent"]
