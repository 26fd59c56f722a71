"""Token buckets, and what each kind of frame costs."""

from __future__ import annotations

import pytest

from asyncgrpo_agent.wire.budgets import Budgets, TokenBucket
from asyncgrpo_agent.wire.frames import DATA, HEADERS, PING, RST_STREAM, Breach, Frame
from asyncgrpo_agent.wire.limits import Limits, Rate

WINDOW_UPDATE = 8
LIMITS = Limits(
    wasted_streams=Rate(per_s=1, burst=2),
    control_frames=Rate(per_s=1, burst=3),
    idle_frames=Rate(per_s=1, burst=4),
)


def frame(kind: int, length: int = 4, *, flags: int = 0) -> Frame:
    return Frame(kind, flags, 1, length, b"")


def affordable(budgets: Budgets, item: Frame, *, known: bool = True, most: int = 50) -> int:
    for count in range(most):
        try:
            budgets.charge_frame(item, 0.0, known=known)
        except Breach:
            return count
    return most


def test_a_bucket_refills_with_time_and_not_above_its_burst() -> None:
    bucket = TokenBucket(Rate(per_s=2, burst=3), 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take(10.5)
    assert not bucket.take(10.6)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(999.0)  # a clock that stands still gives nothing


def test_a_raised_rate_grants_its_burst() -> None:
    bucket = TokenBucket(Rate(per_s=1, burst=1), 0.0)
    bucket.take(0.0)
    bucket.set_rate(Rate(per_s=1, burst=5))
    assert bucket.level == 4


@pytest.mark.parametrize(
    ("client", "item", "known", "expected"),
    [
        (False, frame(HEADERS), False, 2),
        (False, frame(HEADERS), True, 50),  # trailers, once a stream by protocol
        (False, frame(RST_STREAM), True, 50),  # paid for when the stream was opened
        (False, frame(RST_STREAM), False, 4),
        (True, frame(RST_STREAM), True, 2),
        (True, frame(HEADERS), True, 4),
        (True, frame(PING), False, 3),
        (True, frame(WINDOW_UPDATE), False, 4),
        (True, frame(DATA, 0), True, 4),
        (True, frame(DATA, 0, flags=1), True, 50),
        (True, frame(DATA, 64), True, 50),
    ],
)
def test_costs(client: bool, item: Frame, known: bool, expected: int) -> None:
    assert affordable(Budgets(LIMITS, client=client, now=0.0), item, known=known) == expected


def test_streams_that_end_in_order_cost_nothing() -> None:
    budgets = Budgets(LIMITS, client=False, now=0.0)
    for _ in range(100):
        budgets.charge_frame(frame(HEADERS), 0.0, known=False)
        budgets.stream_ended()
    for _ in range(100):
        budgets.charge_frame(frame(HEADERS), 0.0, known=False)
        budgets.stream_abandoned()


def test_bytes_in_either_direction_pay_for_small_frames() -> None:
    budgets = Budgets(LIMITS, client=True, now=0.0)
    for _ in range(100):
        budgets.charge_frame(frame(DATA, 64), 0.0, known=True)
        budgets.charge_frame(frame(WINDOW_UPDATE), 0.0, known=True)
    for _ in range(100):
        budgets.sent(64)
        budgets.charge_frame(frame(WINDOW_UPDATE), 0.0, known=True)
