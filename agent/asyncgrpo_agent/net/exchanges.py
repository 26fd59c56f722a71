"""One request and its whole answer, over whatever connections lead to a vLLM.

`net.unix_exchanger` is the way to one on this host, `net.pool_exchanger` the way to a URL. Both
keep connections between requests, close one whose exchange is cancelled, and say how far a request
came that has no answer, which decides whether it may be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

MAX_ANSWER_BYTES: Final = 64 << 20

HeaderLines = Sequence[tuple[str, str]]


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, whatever its status."""

    status: int
    content_type: str
    body: bytes


class NoAnswerError(Exception):
    """No whole answer came. `sent`: somebody may have got the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


class ClosedEarlyError(NoAnswerError):
    """The connection ended before an answer began. One that was not `fresh` had perhaps been closed
    by the peer before the request was on its way."""

    def __init__(self, reason: str, *, fresh: bool) -> None:
        super().__init__(reason, sent=True)
        self.fresh = fresh


class AnswerTooLargeError(NoAnswerError):
    """It was cut: what follows on its connection is of no use."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the answer is over the limit of {limit_bytes} bytes", sent=True)


class Exchanger(Protocol):
    """Raises NoAnswerError. Any number of tasks may use one."""

    async def exchange(
        self, method: str, path: str, headers: HeaderLines, body: bytes
    ) -> Answer: ...

    async def aclose(self) -> None:
        """Close the connections that are kept."""
