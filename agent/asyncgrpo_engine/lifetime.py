"""How the trainer and TRL's rollout process end: together, soon, and never one without the other.

SIGTERM ends the trainer in at most `STOP_S` and the time it was given to save: the main thread
unwinds, which kills the rollout process on its way; a watchdog ends what does not unwind in time.
Between the beginning of an optimizer step and its end it waits, so that no step is torn in two.
SIGKILL of the trainer reaches the rollout process through the kernel's parent-death signal, which
that process asks for as soon as it starts. The agent kills the whole process group besides.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Stop:
    """What SIGTERM finds; of the main thread."""

    save_s: float = 0.0
    held: bool = False
    wanted: bool = False


_stop: Final = _Stop()


def stop_on_sigterm() -> None:
    """Make SIGTERM raise `Stopped` in this, the main, thread."""
    signal.signal(signal.SIGTERM, _on_sigterm)


def allow_saving(save_s: float) -> None:
    """From now on a stop may take so much longer."""
    _stop.save_s = save_s


def is_wanted() -> bool:
    """SIGTERM came while stops had to wait."""
    return _stop.wanted


def hold() -> None:
    """A step changes the weights from here on: a stop has to wait for `release`."""
    _stop.held = True


def release() -> None:
    """The step is whole. Raises `Stopped` if SIGTERM came meanwhile."""
    _stop.held = False
    if _stop.wanted:
        stop()


def stop() -> None:
    """Raises `Stopped`, once."""
    _stop.held = _stop.wanted = False
    raise Stopped


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watchdog = threading.Timer(STOP_S + _stop.save_s, _end)
    watchdog.daemon = True
    watchdog.start()
    _stop.wanted = _stop.held
    if not _stop.held:
        raise Stopped


def _end() -> None:
    kill_children()
    os._exit(STOPPED)


def kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
