"""Workers: this program again, for what may never return. Asked over pipes, never waited for.

A worker that is stuck in the kernel survives SIGKILL until the kernel lets go of it, so nothing
here waits for the end of one, and none holds anything that somebody waits for: it has a session of
its own, and its three pipes end here. It ends by itself when its standard input does, however this
process ended. It needs no guard as `procs.child` has, for it starts nobody.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from subprocess import PIPE  # noqa: TID251 - see above
from typing import Final

import trio

from asyncgrpo_agent.procs.output import Lines
from asyncgrpo_agent.procs.program import worker_command, worker_environment

_READ_BYTES: Final = 64 * 1024
_GONE_S: Final = 1.0

_killed: Final[list[trio.Process]] = []  # until the kernel lets go of them; then zombies to reap


class Worker:
    """One process. Made by `start` only."""

    def __init__(self, process: trio.Process) -> None:
        self.pid = process.pid
        self._process = process
        assert isinstance(process.stdin, trio.lowlevel.FdStream)
        assert isinstance(process.stdout, trio.lowlevel.FdStream)
        assert isinstance(process.stderr, trio.lowlevel.FdStream)
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal, if it has ended; then nothing is left of it."""
        return self._process.poll()

    async def send(self, data: bytes) -> None:
        """Raises trio.BrokenResourceError when it has ended."""
        await self._stdin.send_all(data)

    async def receive(self) -> bytes:
        """What it has written; empty when it has ended."""
        return await self._stdout.receive_some(_READ_BYTES)

    async def relay_errors(self) -> None:
        """Until its end: pass on what it logs, and its last words."""
        lines = Lines()
        while True:
            data = await self._stderr.receive_some(_READ_BYTES)
            for line in lines.feed(data, final=not data):
                with suppress(OSError, ValueError):  # it may be closed
                    sys.stderr.write(f"{line}\n")
            if not data:
                return

    async def ended(self) -> int | None:
        """Its exit status, once its pipes are closed; not waited for any longer than a moment."""
        with trio.move_on_after(_GONE_S):
            await self._process.wait()
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, which it may never notice, and no more of it here."""
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._process not in _killed:
            _killed.append(self._process)
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()


async def start(*arguments: str) -> Worker:
    """Start this program with `arguments`, which others can see."""
    _reap()
    return Worker(
        await trio.lowlevel.open_process(
            worker_command(*arguments),
            env=worker_environment(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
    )


def _reap() -> None:
    _killed[:] = [process for process in _killed if process.poll() is None]
