"""One look at a path that may be on a mount that hangs. Blocking, for the time before the loop.

The look happens in a process of its own, which is left behind when it does not come back.
"""

from __future__ import annotations

import os
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired  # noqa: TID251 - a worker, see there
from typing import Final

from asyncgrpo_agent.procs.program import worker_command, worker_environment

_stuck: Final[list[Popen[bytes]]] = []  # one that is forgotten is waited for


def mode_of(path: str, timeout_s: float) -> int | None:
    """`os.stat(path).st_mode`, which may raise OSError; None when no answer comes in time."""
    process = Popen(
        worker_command("mount-look", path),
        env=worker_environment(),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=DEVNULL,  # who reads what this process writes must not have to wait for it
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except TimeoutExpired:
        process.kill()
        _stuck.append(process)
        return None
    if process.returncode:
        return None
    mode = int(said)
    if mode < 0:
        raise OSError(-mode, os.strerror(-mode), path)
    return mode
