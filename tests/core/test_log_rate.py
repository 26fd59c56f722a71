from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core import log_rate
from asyncgrpo_agent.core.log_rate import Bucket, ByteRate, LogRate

EVENTS = ["replica.joined", "replica.duplicate", "adapter.unlent"]
LINES = st.lists(
    st.tuples(
        st.sampled_from(EVENTS),
        st.integers(0, 5).map(lambda number: f"192.0.2.{number}" if number else ""),
        st.sampled_from([logging.INFO, logging.WARNING, logging.ERROR]),
        st.integers(1, 700),  # as many alike
        st.floats(0, 20),  # until the next
    ),
    max_size=30,
)


@given(LINES)
def test_lines_are_bounded_and_none_is_lost_uncounted(
    floods: list[tuple[str, str, int, int, float]],
) -> None:
    rate, now_s = LogRate(), 0.0
    written: dict[tuple[str, str], int] = {}
    said: dict[str, int] = {}
    told: dict[str, int] = {}
    worst: dict[str, int] = {}
    for event, peer, severity, lines, pause_s in floods:
        for _ in range(lines):
            said[event] = said.get(event, 0) + 1
            if rate.allows(event, peer, severity, now_s):
                written[event, peer] = written.get((event, peer), 0) + 1
            else:
                worst[event] = max(worst.get(event, 0), severity)
        now_s += pause_s
        for held in rate.due(now_s):
            told[held.event] = told.get(held.event, 0) + held.lines
            assert held.severity == worst.pop(held.event)
        due_s = rate.due_s()
        assert due_s is None or now_s < due_s <= now_s + log_rate.WINDOW_S
    for held in rate.rest():
        told[held.event] = told.get(held.event, 0) + held.lines
    for event in EVENTS:
        of_event = [count for (name, _), count in written.items() if name == event]
        assert sum(of_event) + told.get(event, 0) == said.get(event, 0)
        assert sum(of_event) <= log_rate.EVENT_BURST + now_s * log_rate.EVENT_PER_S + 1
    for (_, peer), count in written.items():
        assert not peer or count <= log_rate.PEER_BURST + now_s * log_rate.PEER_PER_S + 1


def test_what_is_rare_is_never_held_back() -> None:
    rate = LogRate()
    assert all(rate.allows("a.b", "p", logging.INFO, 2.0 * second) for second in range(5000))
    assert rate.due_s() is None


def test_a_peer_of_many_names_costs_no_more_and_no_memory() -> None:
    rate = LogRate()
    written = sum(rate.allows("a.b", f"p{name}", logging.INFO, 0.0) for name in range(50_000))
    assert written == log_rate.EVENT_BURST
    assert len(rate._peers) == log_rate.MAX_PEERS
    (held,) = rate.rest()
    assert held.lines == 50_000 - written
    assert len(held.peers) == log_rate.MAX_COUNTED_PEERS


def test_a_flood_leaves_other_events_and_peers_alone() -> None:
    rate = LogRate()
    for _ in range(10_000):
        rate.allows("a.b", "p", logging.INFO, 0.0)
    assert rate.allows("a.b", "q", logging.INFO, 0.0)
    assert rate.allows("c.d", "p", logging.INFO, 0.0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(2, 1.0)
    assert [bucket.take(1, now_s) for now_s in (5.0, 5.0, 5.0, 4.0, 4.5)] == [True] * 2 + [
        False
    ] * 2 + [False]


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 5)), max_size=200))
def test_bytes_of_a_child_are_bounded(writes: list[tuple[int, float]]) -> None:
    rate, now_s, passed = ByteRate(), 0.0, 0
    for size_bytes, pause_s in writes:
        passed += sum(size_bytes for _ in range(200) if rate.allows(size_bytes, now_s))
        now_s += pause_s
    assert passed <= log_rate.CHILD_BURST_BYTES + now_s * log_rate.CHILD_BYTES_PER_S + 1
