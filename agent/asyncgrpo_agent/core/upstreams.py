"""Servers that are reached through somebody's edge: whose words an answer is, and what it cuts.

An edge (a platform's load balancer) may answer in the server's place, and end what takes too long.
Neither must be taken for the server's own doing. Pure; `seconds` are measured by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

CUT: Final = 504  # how the proxy words it
WRONG_TOKEN: Final = frozenset({401, 403, 407})
UNRUN: Final = frozenset({400, 404, 405, 413, 429, *WRONG_TOKEN})  # an edge passed nothing on
_CUT_STATUSES: Final = frozenset({408, 499})  # and all from 500 on, and no answer at all
_EARLY_SHARE: Final = 0.95  # an edge's clock and ours differ by the way between
_LATE_S: Final = 5.0
_FITS_SHARE: Final = 0.8  # of the limit may be expected
_WEIGHT: Final = 0.1  # of the newest request in the running mean


class _Words(msgspec.Struct):
    message: str


class _Failure(msgspec.Struct):
    error: _Words


_failure = msgspec.json.Decoder(_Failure)


def is_engine_answer(status: int, content_type: str, body: bytes) -> bool:
    """Whether vLLM itself wrote this, going by its form. Login pages are answered 200, too."""
    if not content_type.startswith("application/json") or status in WRONG_TOKEN:
        return False
    if status == 200:
        return body[:1] == b"{"
    try:
        _failure.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return status >= 400


@dataclass(slots=True)
class EdgeLimit:
    """How long one edge lets a request run, in seconds, and how long they have run there."""

    max_request_s: float  # 0 for an edge that cuts none
    token_s: float = 0.0  # of a request, over the tokens that it might have made; a running mean

    def took(self, max_tokens: int, seconds: float) -> None:
        """A request that might have made `max_tokens` was answered, or cut, after so long."""
        token_s = seconds / max(1, max_tokens)
        weight = _WEIGHT if self.token_s else 1.0
        self.token_s += weight * (token_s - self.token_s)

    def fits(self, max_tokens: int) -> bool:
        """Whether such a request is expected to end before it is cut; True if nothing is known."""
        expected_s = self.token_s * max(1, max_tokens)
        return not self.max_request_s or expected_s <= _FITS_SHARE * self.max_request_s

    def is_cut(self, status: int, seconds: float) -> bool:
        """Whether the edge ended a request, not the server. `status` is 0 for no answer."""
        if not self.max_request_s or (0 < status < 500 and status not in _CUT_STATUSES):
            return False
        early_s = _EARLY_SHARE * self.max_request_s
        return early_s <= seconds <= self.max_request_s + max(_LATE_S, 0.25 * self.max_request_s)


def too_long_for(
    limits: Mapping[str, EdgeLimit], max_tokens: int, cut_s: float = 0.0
) -> frozenset[str]:
    """Replicas that should not get a request if another can take it; it was cut after `cut_s`."""
    if not limits:
        return frozenset()
    return frozenset(
        name
        for name, limit in limits.items()
        if limit.max_request_s and (limit.max_request_s <= cut_s or not limit.fits(max_tokens))
    )


def retry_delay_s(failures: int, *, is_missing: bool) -> float:
    """Before an adapter is tried again. One that is not there yet may show any moment."""
    if is_missing:
        return float(min(0.25 * 1.5 ** min(failures, 16), 5.0))
    return float(min(2.0 ** min(failures, 8), 30.0))
