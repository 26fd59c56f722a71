"""Whether a child that ended is started again, and when.

Backoff doubles from one short life to the next. A child that ended before it was ever ready has
something wrong with its configuration or its host: the agent gives up at once and says why. One
that has worked before gets several tries.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

BASE_S: Final = 1.0
CAP_S: Final = 60.0
STABLE_S: Final = 300.0  # after so long a life earlier failures are forgotten
NEVER_READY: Final = 3
CONFIG_CODE: Final = 78
_MAX_DOUBLINGS: Final = 30  # far beyond the cap, and far below where a float overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One life of the child."""

    code: int
    ready: bool  # it had become ready
    lived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    reason: str


def next_restart(exits: Sequence[Exit]) -> Restart | GiveUp:
    """What to do after the last of `exits` (oldest first, at least one)."""
    last = exits[-1]
    if last.code == CONFIG_CODE:
        return GiveUp(reason="its configuration is wrong; a restart would not help")
    in_vain = len(list(takewhile(lambda past: not past.ready, reversed(exits))))
    if in_vain == len(exits):
        return GiveUp(reason="it ended before it was ever ready")
    if in_vain >= NEVER_READY:
        return GiveUp(reason=f"it did not become ready again, {in_vain} times in a row")
    short = len(list(takewhile(lambda past: past.lived_s < STABLE_S, reversed(exits))))
    delay_s = min(BASE_S * 2.0 ** min(max(0, short - 1), _MAX_DOUBLINGS), CAP_S)
    return Restart(delay_s=delay_s, reason=f"{how_it_ended(last.code)} after {last.lived_s:.0f} s")


def how_it_ended(code: int) -> str:
    """An exit status in words; negative ones are signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (", maybe out of memory," if -code == signal.SIGKILL else "")
