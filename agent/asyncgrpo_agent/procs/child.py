"""Children: the one place where a program is started, watched, read and stopped.

Theory of operation. A child runs in a session and process group of its own, and everything that it
starts stays in that group (neither vLLM nor TRL leaves it). The invariant: when the child has
ended, in whatever way, nobody of its group is left.

* It ends by itself or is stopped: the agent kills what is left of the group before it reports.
* The agent is killed (SIGKILL, out of memory): nobody is left to do so. Therefore the program is
  started through a shell of a few lines, which leaves a guard behind in the group and then becomes
  the program by `exec`, so that pid and exit status are the program's own. The guard waits for the
  end of a pipe of which only the agent holds the other side. When that closes, and the kernel
  closes it however the agent died, the guard ends the group: SIGTERM, some seconds, SIGKILL. There
  is no moment without a guard: the pipe exists before the shell does, and the guard before the
  program.

Why not PR_SET_PDEATHSIG: it reaches the child alone and not vLLM's workers, is bound to the thread
that forked (trio forks in worker threads) and needs Python code between fork and exec. Why not a
guard written in Python: a shell is on every host, takes 1 MB, and needs no way back into a frozen
agent. That the guard is a member of the group also keeps the group's id from being used again, so
that signals sent to it cannot hit strangers.

What must not be done elsewhere: forking this process without exec, because the copy would hold the
pipe open. A program that calls setsid leaves the group and is out of reach.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT  # noqa: TID251 - this is the place
from typing import Final

import trio

from asyncgrpo_agent.errors import ChildError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs.environment import Kind, child_environment, secret_values
from asyncgrpo_agent.procs.group import is_alive, signal_group
from asyncgrpo_agent.procs.output import TAIL_LINES, Output

GRACE_S: Final = 10.0
GUARD_GRACE_S: Final = 10.0
_GONE_S: Final = 30.0  # a process that holds GPUs takes its time even after SIGKILL
_DRAIN_S: Final = 1.0
_POLL_S: Final = 0.01
_READ_BYTES: Final = 32 * 1024

# $0 names the guard in process lists, $1 is the guard's grace in seconds, the rest the program.
# The guard is started through a subshell that ends at once: the program must not find a child that
# it never started. It ignores the signals that the group gets and holds none of its output.
_LAUNCHER: Final = """
exec 3<&0 </dev/null
( (
  trap '' HUP INT TERM
  read -r _ <&3
  kill -TERM 0
  sleep "$1"
  kill -KILL 0
) >/dev/null 2>&1 & )
exec 3<&-
shift
exec "$@"
"""
log = Log(__name__)


class Child:
    """A program that runs, or has run. Made by `started` only."""

    def __init__(self, name: str, process: trio.Process, output: Output) -> None:
        self.name = name
        self.pid = process.pid
        self.returncode: int | None = None
        """The program's exit status once it has ended; negative for a signal."""
        self._process = process
        self._output = output
        self._ended = trio.Event()
        self._watch = trio.CancelScope(shield=True)

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} returncode={self.returncode}>"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines that it wrote, at most KEPT_LINES."""
        return self._output.tail(lines)

    async def wait(self) -> int:
        """Its exit status, when it has ended and nobody of its group is left."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """To all of its group; nothing once the program has ended."""
        if self._process.returncode is None:  # else `_run` has the group's end in hand
            signal_group(self.pid, number)

    async def stop(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM to the group, SIGKILL after `grace_s`; may be called again, even at once.

        It is not cut short by cancellation. Raises ChildError if the kernel does not let go.
        """
        await self._end_by(signal.SIGTERM, grace_s)
        if not self._ended.is_set():
            log.warning("child.killed", child=self.name, pid=self.pid, grace_s=grace_s)
            await self._end_by(signal.SIGKILL, 2 * _GONE_S)
        if self.returncode is None:
            raise ChildError(
                f"{self.name} (process {self.pid}) does not end after SIGKILL",
                fix="It hangs in the kernel: look at dmesg for its GPU driver or mount",
            )
        return self.returncode

    async def _end_by(self, number: signal.Signals, patience_s: float) -> None:
        self.send_signal(number)
        with trio.move_on_after(patience_s, shield=True):
            await self._ended.wait()

    async def _run(self) -> None:
        """Read and reap. Goes on under cancellation until the child has been stopped."""
        drained = trio.CancelScope()
        with self._watch:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, drained)
                returncode = await self._process.wait()
                signal_group(self.pid, signal.SIGKILL)
                await self._group_gone()
                # Only a process that left the group can still hold the output.
                drained.deadline = trio.current_time() + _DRAIN_S
            self.returncode = returncode
            self._ended.set()

    async def _read(self, drained: trio.CancelScope) -> None:
        assert self._process.stdout is not None
        with drained:
            async with self._process.stdout as stdout:
                while data := await stdout.receive_some(_READ_BYTES):
                    self._output.feed(bytes(data))
        self._output.close()

    async def _release(self) -> None:
        """Let go of everything, also of a child that could not be stopped."""
        self._watch.cancel()
        self._output.close()
        assert self._process.stdin is not None
        with trio.CancelScope(shield=True):  # closes a pipe, which does not wait
            await self._process.stdin.aclose()

    async def _group_gone(self) -> None:
        with trio.move_on_after(_GONE_S):
            while is_alive(self.pid):  # noqa: ASYNC110 - the kernel tells nobody
                await trio.sleep(_POLL_S)
            return
        log.error("child.survivors", child=self.name, group=self.pid, waited_s=_GONE_S)


@asynccontextmanager
async def started(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    log_file: Path | None = None,
    grace_s: float = GRACE_S,
    routine: bool = False,
    secrets: Sequence[str] = (),
) -> AsyncIterator[Child]:
    """Run `argv` for as long as the block lasts; leaving it, in any way, stops the child.

    `env` is the whole environment (see `procs.environment`). Standard output and error are one:
    each line goes to `log_file` and to `on_line`, without `secrets` and those of `env`. What the
    block raises comes out as it is.
    Start and end of a `routine` child, one of many alike, are logged for debugging only.
    """
    _check_executable(name, argv[0], env)
    hidden = [*secret_values(env), *filter(None, secrets)]
    output = Output(name, on_line=on_line, log_file=log_file, secrets=hidden)
    process = await _spawn(argv, env=env, cwd=cwd, guard_grace_s=min(grace_s, GUARD_GRACE_S))
    child = Child(name, process, output)
    tell = log.debug if routine else log.info
    tell("child.started", child=name, pid=child.pid)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child._run)
        nursery.start_soon(output.deliver)
        try:
            try:
                yield child
            finally:
                await child.stop(grace_s)
        except BaseException as error:  # raised below, where no nursery wraps it
            failure = error
        await child._release()
    tell("child.ended", child=name, pid=child.pid, returncode=child.returncode)
    if failure is not None:
        raise failure


async def output_of(
    name: str, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    """Run a short program to its end: exit status and its last lines. Raises ChildError."""
    async with started(name, argv, env=env, grace_s=1.0) as child:
        with trio.move_on_after(timeout_s):
            return await child.wait(), child.tail()
        raise ChildError(f"{name} did not end within {timeout_s:g} s", where=argv[0])


def inherited(
    additions: Mapping[str, str], kind: Kind = "engine", *, gpus: str = "", caches: str = ""
) -> dict[str, str]:
    """The environment of a child of this very process; see `procs.environment`."""
    return child_environment(
        os.environ,
        additions,
        frozen=bool(getattr(sys, "frozen", False)),
        kind=kind,
        gpus=gpus,
        caches=caches,
    )


async def _spawn(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, guard_grace_s: float
) -> trio.Process:
    return await trio.lowlevel.open_process(
        ["/bin/sh", "-c", _LAUNCHER, "asyncgrpo-launcher", f"{guard_grace_s:g}", *argv],
        env=dict(env),
        cwd=cwd,
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )


def _check_executable(name: str, program: str, env: Mapping[str, str]) -> None:
    if shutil.which(program, path=env.get("PATH")) is None:
        raise ChildError(
            f"{name} cannot be started: {program} is not an executable file", where=program
        )
