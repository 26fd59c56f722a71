"""Process groups: sending signals to one, and telling whether anybody is left in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def signal_group(group: int, number: int) -> None:
    """Send signal `number` to all of `group`; nobody there is no error."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def is_alive(group: int) -> bool:
    """Whether a process of `group` still runs. Its leader must have been reaped before.

    Dead members that nobody has reaped do not count: in containers the first process often reaps
    none. Where this process is that first process, they are its own and are reaped here.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return any(_runs_in(group, entry) for entry in _PROC.iterdir() if entry.name.isdigit())


def _runs_in(group: int, entry: Path) -> bool:
    try:
        stat = (entry / "stat").read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return False
    # "pid (any name) state parent group ..."
    state, _parent, its_group = stat.rpartition(")")[2].split()[:3]
    return int(its_group) == group and state not in "ZX"
