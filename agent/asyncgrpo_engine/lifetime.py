"""How the trainer and TRL's rollout process end: together, soon, and never one without the other.

SIGTERM ends the trainer in at most `STOP_S`: the main thread unwinds, which kills the rollout
process on its way; a watchdog ends what does not unwind in time.
SIGKILL of the trainer reaches the rollout process through the kernel's parent-death signal, which
that process asks for as soon as it starts. The agent kills the whole process group besides.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from types import FrameType
from typing import Final

STOP_S: Final = 8.0
STOPPED: Final = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG: Final = 1


class Stopped(SystemExit):
    """Raised in the main thread by SIGTERM; no `except Exception` on its way catches it."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


def die_with_parent() -> None:
    """Be killed when the trainer is gone; for a process that multiprocessing is about to start."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # it went before the kernel knew
        os._exit(1)


def stop_on_sigterm() -> None:
    """Make SIGTERM raise `Stopped` in this, the main, thread."""
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watchdog = threading.Timer(STOP_S, _end)
    watchdog.daemon = True
    watchdog.start()
    raise Stopped


def _end() -> None:
    kill_children()
    os._exit(STOPPED)


def kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
