"""Server-sent events come out whole, however they are cut on their way."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.event_stream import MAX_EVENT_BYTES, EventReader, ServerEvent

STREAM = b'id: 7\nevent: note\ndata: {"a": 1}\n\n: here\n\ndata: x\ndata:y\n\nevent: empty\n\n'
EVENTS = [ServerEvent("note", '{"a": 1}', "7"), ServerEvent("message", "x\ny", "")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_however_it_is_cut(cuts: list[int]) -> None:
    reader, found = EventReader(), []
    marks = [0, *sorted(cuts), len(STREAM)]
    for first, end in pairwise(marks):
        found += reader.feed(STREAM[first:end])
    assert found == EVENTS


def test_what_has_no_end_is_refused() -> None:
    with pytest.raises(ValueError, match="over"):
        EventReader().feed(b"x" * (MAX_EVENT_BYTES + 1))
    with pytest.raises(ValueError, match="utf-8"):
        EventReader().feed(b"data: \xff\n\n")
