"""Timers at exact times."""

from __future__ import annotations

from math import inf

from asyncgrpo_agent.wire.limits import Limits
from asyncgrpo_agent.wire.liveness import Liveness

LIMITS = Limits(ping_s=10, ping_deadline_s=4, settings_deadline_s=5)


def ready(now: float = 0.0) -> Liveness:
    liveness = Liveness(LIMITS, now)
    liveness.ready()
    return liveness


def test_settings_come_first() -> None:
    liveness = Liveness(LIMITS, 100.0)
    assert liveness.next_deadline() == 105.0
    assert liveness.ping_due(200.0) is None
    assert liveness.overdue(104.99) is None
    assert liveness.overdue(105.0) is not None
    liveness.ready()
    assert liveness.overdue(105.0) is None
    assert liveness.next_deadline() == 110.0


def test_pings_go_out_busy_or_idle() -> None:
    liveness = ready()
    liveness.heard(9.0)
    assert liveness.ping_due(9.99) is None
    first = liveness.ping_due(10.0)
    assert first is not None
    assert liveness.ping_due(10.0) is None
    assert liveness.acked(first, 10.5) == 0.5
    assert liveness.acked(first, 10.6) is None
    second = liveness.ping_due(20.0)
    assert second is not None
    assert second != first
    assert liveness.acked(first, 20.1) is None
    assert liveness.acked(b"anything", 20.1) is None


def test_bytes_move_the_deadline_of_a_ping_that_is_out() -> None:
    liveness = ready()
    liveness.ping_due(10.0)
    assert liveness.next_deadline() == 14.0
    liveness.heard(12.0)
    assert liveness.next_deadline() == 16.0
    assert liveness.overdue(15.9) is None
    assert "silent for 4.0 s" in (liveness.overdue(16.0) or "")


def test_a_frame_has_one_deadline_from_its_start() -> None:
    liveness = ready()
    liveness.unfinished(1.0, 7.0)
    liveness.unfinished(6.0, 7.0)
    assert liveness.next_deadline() == 8.0
    assert "frame or header block" in (liveness.overdue(8.0) or "")
    liveness.finished()
    assert liveness.overdue(8.0) is None
    liveness.unfinished(9.0, 7.0)
    assert liveness.overdue(15.9) is None
    assert liveness.overdue(16.0) is not None
    liveness.unfinished(16.0, inf)
    assert liveness.overdue(16.0) is None


def test_new_ping_times_hold_for_the_next_ping() -> None:
    liveness = ready()
    liveness.set_ping(2.0, 1.0, 5.0)
    assert liveness.next_deadline() == 7.0
    assert liveness.ping_due(7.0) is not None
    assert liveness.next_deadline() == 8.0
    liveness.set_ping(30.0, 30.0, 7.5)
    assert liveness.next_deadline() == 37.0


def test_a_deadline_passed_to_tick_is_never_left_standing() -> None:
    liveness, now = ready(), 0.0
    for _ in range(5):
        now = liveness.next_deadline()
        payload = liveness.ping_due(now)
        assert payload is not None
        liveness.acked(payload, now)
        assert liveness.next_deadline() > now
