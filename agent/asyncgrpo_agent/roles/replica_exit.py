"""Ends that a replica chooses itself: after a long time without work, and with a word to its host.

A host that is paid by the hour should not wait for a run that is over. So the agent may end when no
rollout has come for long, and may run one command after an end of its own choice, such as the
platform's stop call for this very machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Final

import trio

from asyncgrpo_agent.errors import ChildError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child

log = Log(__name__)

LOOK_EVERY_S: Final = 1.0
COMMAND_S: Final = 60.0


async def until_idle(limit_s: float, work: Callable[[], tuple[bool, int, int]]) -> None:
    """Until nothing has run for `limit_s` in a row; for ever if that is 0.

    `work` says whether vLLM is up, how many rollouts run and how many have come so far. Time in
    which vLLM is down does not count: what is slow to start must not end for it.
    """
    if not limit_s:
        await trio.sleep_forever()
    quiet_since, seen = trio.current_time(), 0
    while True:
        now = trio.current_time()
        is_up, running, count = work()
        if not is_up or running or count != seen:
            quiet_since, seen = now, count
        elif now - quiet_since >= limit_s:
            return
        await trio.sleep(min(LOOK_EVERY_S, limit_s))


async def call_on_exit(command: Sequence[str], timeout_s: float = COMMAND_S) -> None:
    """Run the command, if there is one, in an environment without secrets. Its failure is logged.

    A signal ends it: then somebody else is stopping this host, often by the command's own doing.
    """
    if not command:
        return
    log.info("on_exit.calling", program=os.path.basename(command[0]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
        await _run(command, timeout_s)
        nursery.cancel_scope.cancel()


async def _run(command: Sequence[str], timeout_s: float) -> None:
    environment = child.inherited({}, kind="tool")
    try:
        code, tail = await child.output_of(
            "on_exit_command", command, env=environment, timeout_s=timeout_s
        )
    except (ChildError, OSError) as error:
        log.error("on_exit.failed", reason=str(error))
        return
    if code:
        log.error("on_exit.failed", reason=f"it ended with exit code {code}", output=tail)
    else:
        log.info("on_exit.called")


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.warning("on_exit.stopped", signal=signal.Signals(number).name)
            scope.cancel()
