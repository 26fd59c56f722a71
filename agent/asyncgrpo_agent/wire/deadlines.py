"""How long the peer of one stream may take, and the clock that notices when it takes longer.

Only waits on the peer count: for the first byte of its body, for the next one while somebody wants
it, for its window while bytes of ours stand before it. A timer costs a few assignments an event;
its owner looks at it about once a second, so that an end comes never early and up to that late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDeadlines:
    """Each is infinite unless given."""

    first_byte_s: float = math.inf
    """From the stream's opening to the first byte of the peer's body, or to its end. Headers do
    not count: the answer to a rollout begins with its headers, and goes on minutes later."""

    progress_s: float = math.inf
    """After that: until the next byte of a body that somebody waits for. At any time: until the
    peer opens its window for bytes that wait to be sent."""

    total_s: float = math.inf
    """From the stream's opening to its end."""


UNLIMITED: Final = StreamDeadlines()
"""For streams that are as long as their link, whose liveness covers them."""

STRANGERS: Final = StreamDeadlines(first_byte_s=10.0, progress_s=10.0, total_s=30.0)
"""Until the peer has proved who it is."""

KNOWN_PEERS: Final = StreamDeadlines(first_byte_s=60.0, progress_s=60.0)
"""For what a peer asks of us once it has."""

PROGRESS_S: Final = 60.0

ROLLOUTS: Final = StreamDeadlines(progress_s=PROGRESS_S)
"""For what we ask of a peer: how long the first byte may take is the rollout's own matter."""


ADAPTERS: Final = StreamDeadlines(progress_s=60.0)
"""For an adapter that we send: a large one may take hours, as long as it moves."""

READERS: Final = StreamDeadlines(first_byte_s=10.0, progress_s=60.0, total_s=6 * 3600.0)
"""For an adapter that the holder of a token takes, who is no agent of the fleet."""


VIEWERS: Final = StreamDeadlines(first_byte_s=20.0, progress_s=60.0)
"""For people and scripts that look on: a live stream is as long as its page is open."""


class StreamTimer:
    """The waits of one stream. Whoever sends, receives and waits on it keeps the fields true."""

    __slots__ = ("_opened", "_sent_bytes", "_stuck_since", "begun", "deadlines", "queued_bytes",
                 "reading_since")  # fmt: skip

    def __init__(self, deadlines: StreamDeadlines, now: float) -> None:
        self.deadlines = deadlines
        self._opened = now
        self._stuck_since = math.inf
        self._sent_bytes = 0
        self.begun = False
        """A byte of the peer's body came, or its end."""
        self.reading_since = math.inf
        """When somebody began to wait for the next byte."""
        self.queued_bytes = 0
        """All that was ever queued to be sent."""

    def overdue(self, now: float, *, unsent_bytes: int, window_open: bool) -> str | None:
        """Why the stream has to end, or None."""
        limits = self.deadlines
        self._look_at_window(now, unsent_bytes, window_open)
        if now - self._opened >= limits.total_s:
            return f"the stream did not end within {limits.total_s:g} s"
        if now - self._stuck_since >= limits.progress_s:
            return f"the peer opened no window for {limits.progress_s:g} s"
        if not self.begun:
            if now - self._opened >= limits.first_byte_s:
                return f"no first byte came within {limits.first_byte_s:g} s"
        elif now - self.reading_since >= limits.progress_s:
            return f"the next byte did not come within {limits.progress_s:g} s"
        return None

    def _look_at_window(self, now: float, unsent_bytes: int, window_open: bool) -> None:
        """A closed window is normal while bytes move; what counts is that none did."""
        sent_bytes = self.queued_bytes - unsent_bytes
        if not unsent_bytes or window_open:
            self._stuck_since = math.inf
        elif sent_bytes != self._sent_bytes or self._stuck_since == math.inf:
            self._stuck_since = now
        self._sent_bytes = sent_bytes
