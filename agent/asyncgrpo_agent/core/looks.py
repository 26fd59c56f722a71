"""When a replica looks at the bucket next, if nothing wakes it before.

Each look at a mount costs requests, so the timer is slow while a proxy can announce what is new,
and quick for what it has announced and the bucket does not show yet. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

WATCHED_S: Final = 5.0  # between rounds where changes are told; one that is missed costs this
POLL_S: Final = 1.0  # the same where nobody tells of any
HINTED_POLL_S: Final = 15.0  # the same where only the proxy does
AWAIT_S: Final = 0.1  # between looks for what was announced a moment ago and is not visible yet
AWAIT_SHARE: Final = 0.04  # later on, a part of the time that it has been awaited


def pause_s(
    *, watched: bool, linked: bool, retries_s: Iterable[float], awaited_s: Iterable[float]
) -> float:
    """How long to wait. `retries_s`: until what failed is tried again; `awaited_s`: for how long
    each announced commit has been awaited."""
    if watched:
        return min([WATCHED_S, *retries_s])
    due_s = [max(AWAIT_S, AWAIT_SHARE * seconds) for seconds in awaited_s]
    return min([HINTED_POLL_S if linked else POLL_S, *retries_s, *due_s])
