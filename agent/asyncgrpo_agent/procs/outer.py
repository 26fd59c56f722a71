"""The outer process of a one-file build: the one that unpacked this program and waits for its end.

People and service managers know only the outer one. Signals sent to it arrive here, but SIGKILL
cannot be passed on: it would leave an agent that nobody sees, with its link and its GPUs. So the
kernel is asked to kill this process, too, when the outer one dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def follow_outer_process() -> None:
    """From now on die with the outer process; does nothing in any other form of this program."""
    if not _is_one_file():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _is_another_program(os.getppid()):  # the outer one had died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _is_one_file() -> bool:
    """Whether this runs from a folder that is unpacked anew at every start."""
    unpacked = getattr(sys, "_MEIPASS", None)
    beside = Path(sys.executable).resolve().parent
    return unpacked is not None and not Path(unpacked).resolve().is_relative_to(
        beside / "_internal"
    )


def _is_another_program(pid: int) -> bool:
    try:
        return not os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:  # no /proc here, or not for this user: nothing is known
        return False
