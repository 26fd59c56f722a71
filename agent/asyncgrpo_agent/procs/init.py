"""The first process of a container, PID 1, around the agent.

The kernel gives to PID 1 every process whose parent has died, and keeps each as a zombie until
PID 1 asks for its end; and it lets PID 1 ignore every signal that it has no handler for. An agent
cannot ask for the end of processes that it never started without taking those of its own children.
So the process that is started as PID 1 forks, before anything else happens: the child becomes the
agent, and the parent, which is all that this module is, passes signals on, reaps, and ends as the
agent ends. The kernel then kills whatever is left in the container.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Final

_ITS_OWN: Final = frozenset((signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU))
_EXIT_SIGNALLED: Final = 128  # and the number of the signal, as shells report it


def stand_apart_if_first() -> None:
    """Returns in the agent's own process; does nothing where this is no PID 1."""
    if os.getpid() != 1:
        return
    everything = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, everything)  # none may be lost on the way
    agent = os.fork()
    if agent == 0:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code = _serve(agent, everything)
    sys.stdout.flush()
    os._exit(code)


def _take_terminal() -> None:
    """A group of its own: else Ctrl-C would come from the terminal, and once more from PID 1."""
    os.setpgid(0, 0)
    with suppress(OSError):  # standard input is no terminal, or not this container's
        os.tcsetpgrp(0, os.getpgrp())


def _serve(agent: int, everything: set[signal.Signals]) -> int:
    """Until the agent ends. The result is its exit code."""
    while True:
        number = signal.sigwait(everything)
        if number == signal.SIGCHLD:
            status = _reaped(agent)
            if status is not None:
                return status
        elif number not in _ITS_OWN:
            with suppress(ProcessLookupError):
                os.kill(agent, number)


def _reaped(agent: int) -> int | None:
    """Ask for the end of all that have ended; the agent's exit code if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == agent:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else _EXIT_SIGNALLED - ended
