from __future__ import annotations

import json
from typing import Any

import pytest

from asyncgrpo_agent.core.segments import (
    EVERY_S,
    LONGEST_S,
    MAX_RECORD_BYTES,
    Joined,
    Segment,
    decode,
    encode,
    line_of,
    parse_segment_name,
    segment_key,
    wait_s,
)

ATTEMPT = "a0003-7f3c"


def record(t: float, kind: str = "metrics", **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


def encoded(*records: dict[str, Any], start: int = 0, end: int = 100, history: str = "h") -> bytes:
    lines = [line for one in records if (line := line_of(one)) is not None]
    return encode(lines, history=history, start=start, end=end, run="demo", attempt=ATTEMPT)


def decoded(data: bytes) -> Segment:
    segment = decode(data)
    assert segment is not None
    return segment


@pytest.mark.parametrize(("number", "retry"), [(0, 0), (7, 0), (1_000_000, 12)])
def test_a_key_is_read_back(number: int, retry: int) -> None:
    key = segment_key(ATTEMPT, number, retry)
    found = parse_segment_name(ATTEMPT, key.rpartition("/")[2])
    assert found is not None
    assert (found.key, found.number, found.retry) == (key, number, retry)


@pytest.mark.parametrize("name", ["7.jsonl", "000007.json", "000007-r0.jsonl", "000007.jsonl.part"])
def test_other_names_are_none(name: str) -> None:
    assert parse_segment_name(ATTEMPT, name) is None
    assert parse_segment_name("a3", "000007.jsonl") is None


def test_a_segment_is_read_back_and_leaves_out_what_is_of_use_at_home_only() -> None:
    segment = decoded(encoded(record(1.0), record(2.0, "holds"), record(3.0, "ended", ok=True)))
    assert segment.is_whole
    assert (segment.history, segment.start, segment.end) == ("h", 0, 100)
    assert [one["t"] for one in segment.records] == [1.0, 3.0]


def test_no_record_is_longer_than_its_limit() -> None:
    assert line_of(record(1.0, "error", what="x" * MAX_RECORD_BYTES)) is None


def test_every_cut_is_noticed() -> None:
    data = encoded(record(1.0), record(2.0), record(3.0))
    for at in range(len(data)):
        segment = decode(data[:at])
        assert segment is None or not segment.is_whole
        assert segment is None or [one["t"] for one in segment.records] <= [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"kind":"metrics"}\n',
        b'{"kind":"segment","history":1,"start":0,"end":1}\n',
        b'{"kind":"segment","history":"h","start":true,"end":1}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_segment_is_none(data: bytes) -> None:
    assert decode(data) is None


def times(joined: Joined, data: bytes) -> list[float]:
    return [one["t"] for one in joined.add(decoded(data))]


def test_a_retry_goes_on_where_the_cut_one_ended() -> None:
    joined, data = Joined(), encoded(record(1.0), record(1.0), record(2.0))
    cut = data[: data.index(b'{"t":2.0')]
    assert times(joined, cut) == [1.0, 1.0]
    assert times(joined, data) == [2.0]
    assert times(joined, data) == []


def test_what_overlaps_is_read_once() -> None:
    joined = Joined()
    assert times(joined, encoded(record(1.0), record(2.0), end=50)) == [1.0, 2.0]
    wider = encoded(record(1.0), record(2.0), record(3.0), end=80)
    assert times(joined, wider) == [3.0]
    assert times(joined, encoded(record(4.0), start=80, end=90)) == [4.0]


def test_histories_of_two_hosts_do_not_meet() -> None:
    joined = Joined()
    assert times(joined, encoded(record(5.0))) == [5.0]
    assert times(joined, encoded(record(4.0), history="other")) == [4.0]


def test_lines_are_json_without_blanks() -> None:
    line = line_of(record(1.0, step=3))
    assert line == '{"t":1.0,"kind":"metrics","step":3}'
    assert json.loads(line)["step"] == 3


def test_a_long_run_gets_fewer_segments_a_day() -> None:
    assert wait_s(0.0) == wait_s(3600.0) == EVERY_S
    assert EVERY_S < wait_s(10_000.0) < LONGEST_S
    assert wait_s(1e6) == LONGEST_S
