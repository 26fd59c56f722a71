"""A platform's word that it is about to take this host: a command that ends with 0 when it comes.

The command may look once and end, then it is run again after a while, or wait for the notice
itself. Any other exit status means that there is none yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from asyncgrpo_agent.errors import ChildError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child

log = Log(__name__)


async def noticed(command: Sequence[str], every_s: float) -> None:
    """Until the platform gives notice; for ever without a command.

    It sees the agent's environment without secrets. One that cannot be started is logged once and
    tried again: a host must not stop because it cannot be told that it will be.
    """
    if not command:
        await trio.sleep_forever()
    environment, is_failing = child.inherited({}, kind="tool"), False
    while True:
        try:
            async with child.started(
                "notice_command", command, env=environment, routine=True
            ) as process:
                if await process.wait() == 0:
                    return
            is_failing = False
        except (ChildError, OSError) as error:
            if not is_failing:
                log.error("notice.unknown", reason=str(error))
            is_failing = True
        await trio.sleep(every_s)
