"""A trainer that starts again by itself when TRL crashed or hung.

Each life is a whole start: it registers as a new attempt, and goes on at the newest checkpoint, as
one on another host would. What is no failure of TRL's, such as a wrong setting or a bucket that is
gone, ends the trainer as ever.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.restarts import Again, Failure, Stop, next_start
from asyncgrpo_agent.errors import AgentError, ChildExitedError, ChildNotReadyError
from asyncgrpo_agent.logs import Log

log = Log(__name__)

BASE_S: Final = 2.0
CAP_S: Final = 60.0
HEALTHY_S: Final = 300.0


class LifeFailedError(Exception):
    """TRL ended one life; `cause` says how. Never leaves this module's `run`."""

    def __init__(self, failure: Failure, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.failure = failure
        self.cause = cause


@dataclass(slots=True)
class Lives:
    """Of one run in one process. `tell` hears of a start that follows: reason and delay."""

    allowed: int
    rng: Random
    tell: Callable[[str, float], None]
    _failures: list[Failure] = field(default_factory=list)

    def goes_on_after(self, failure: Failure) -> bool:
        """Whether another life would follow one that failed like this."""
        return isinstance(next_start([*self._failures, failure], self.allowed), Again)

    async def run(self, live: Callable[[], Awaitable[int]]) -> int:
        """The exit code of the life that ends by itself, or 0 for a signal between two.

        `live` raises LifeFailedError. Raises the cause of the last one.
        """
        backoff = Backoff(self.rng, base_s=BASE_S, cap_s=CAP_S, healthy_s=HEALTHY_S)
        while True:
            backoff.connected(trio.current_time())
            try:
                return await live()
            except LifeFailedError as failed:
                self._failures.append(failed.failure)
                decision = next_start(self._failures, self.allowed)
                if isinstance(decision, Stop):
                    log.error("trainer.given_up", reason=decision.reason)
                    raise failed.cause from None
                reason = _first_line(failed.cause)
            backoff.lost(trio.current_time())
            delay_s = backoff.next_delay_s()
            log.warning("trainer.again", reason=reason, note=decision.reason, in_s=delay_s)
            self.tell(reason, delay_s)
            if await _signalled_within(delay_s):
                return 0


def failure_of_trl(error: BaseException) -> AgentError | None:
    """What TRL did, if that is why `error` was raised."""
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error if isinstance(error, (ChildExitedError, ChildNotReadyError)) else None


def _first_line(error: BaseException) -> str:
    found = failure_of_trl(error)
    return found.what if found is not None else str(error)


async def _signalled_within(delay_s: float) -> bool:
    """Wait, unless somebody wants the trainer to end."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        with trio.move_on_after(delay_s):
            async for number in signals:
                log.info("trainer.stopping", signal=signal.Signals(number).name)
                return True
    return False
