"""Waits for a peer at exact times."""

from __future__ import annotations

import math

from asyncgrpo_agent.wire.deadlines import UNLIMITED, StreamDeadlines, StreamTimer


def overdue(
    timer: StreamTimer, now: float, *, unsent_bytes: int = 0, window_open: bool = True
) -> str:
    return timer.overdue(now, unsent_bytes=unsent_bytes, window_open=window_open) or ""


def test_first_byte() -> None:
    timer = StreamTimer(StreamDeadlines(first_byte_s=10), 100.0)
    assert not overdue(timer, 109.9)
    assert "no first byte came within 10 s" in overdue(timer, 110.0)
    timer.begun = True
    assert not overdue(timer, 1e9)


def test_the_next_byte_counts_only_while_somebody_waits_for_it() -> None:
    timer = StreamTimer(StreamDeadlines(progress_s=10), 0.0)
    timer.begun = True
    assert not overdue(timer, 1e6)
    timer.reading_since = 1e6
    assert not overdue(timer, 1e6 + 9.9)
    assert "the next byte did not come within 10 s" in overdue(timer, 1e6 + 10)
    timer.reading_since = math.inf
    assert not overdue(timer, 1e6 + 10)


def test_the_wait_for_the_first_byte_is_no_lack_of_progress() -> None:
    timer = StreamTimer(StreamDeadlines(progress_s=10), 0.0)
    timer.reading_since = 0.0
    assert not overdue(timer, 1e6)


def test_total() -> None:
    timer = StreamTimer(StreamDeadlines(total_s=30), 5.0)
    timer.begun = True
    assert not overdue(timer, 34.9)
    assert "did not end within 30 s" in overdue(timer, 35.0)


def test_a_closed_window_counts_from_when_it_was_seen_without_movement() -> None:
    timer = StreamTimer(StreamDeadlines(progress_s=10), 0.0)
    timer.queued_bytes = 100
    assert not overdue(timer, 50.0, unsent_bytes=40, window_open=False)
    assert not overdue(timer, 59.0, unsent_bytes=39, window_open=False)  # a byte went out
    assert not overdue(timer, 68.9, unsent_bytes=39, window_open=False)
    assert "opened no window for 10 s" in overdue(timer, 69.0, unsent_bytes=39, window_open=False)


def test_bytes_that_only_wait_for_the_line_are_not_the_windows_fault() -> None:
    timer = StreamTimer(StreamDeadlines(progress_s=10), 0.0)
    timer.queued_bytes = 100
    assert not overdue(timer, 1.0, unsent_bytes=40, window_open=False)
    assert not overdue(timer, 11.0, unsent_bytes=40, window_open=True)
    assert not overdue(timer, 12.0, unsent_bytes=40, window_open=False)
    assert not overdue(timer, 21.9, unsent_bytes=40, window_open=False)
    assert overdue(timer, 22.0, unsent_bytes=40, window_open=False)


def test_more_bytes_behind_those_that_are_stuck_are_no_movement() -> None:
    timer = StreamTimer(StreamDeadlines(progress_s=10), 0.0)
    timer.queued_bytes = 100
    assert not overdue(timer, 0.0, unsent_bytes=100, window_open=False)
    timer.queued_bytes += 50
    assert not overdue(timer, 5.0, unsent_bytes=150, window_open=False)
    assert overdue(timer, 10.0, unsent_bytes=150, window_open=False)


def test_unlimited() -> None:
    timer = StreamTimer(UNLIMITED, 0.0)
    timer.queued_bytes = 1
    timer.begun = True
    timer.reading_since = 0.0
    assert not overdue(timer, 1e9, unsent_bytes=1, window_open=False)
    assert not overdue(timer, 2e9, unsent_bytes=1, window_open=False)
