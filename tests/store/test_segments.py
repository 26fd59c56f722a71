"""Segments of a history on a mount that allows no more than Mountpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.core.segments import MAX_SEGMENT_BYTES
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.store import segments
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.segments import (
    list_recorded_runs,
    list_segments,
    read_segments,
    write_segment,
)
from fakes.bucket import ATTEMPT
from fakes.strict_mount import Host, StrictBucket


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Host]:
    with StrictBucket(tmp_path / "s3").mount("trainer") as made:
        yield made


def test_segments_are_listed_in_order_and_read_together(mounted: Host) -> None:
    listing = Listing(mounted.path / "run")
    assert list_segments(listing) == []
    for attempt, number in (("a0002-0000", 0), (ATTEMPT, 1), (ATTEMPT, 0)):
        write_segment(listing, attempt, number, b"%d\n" % number)
    keys = list_segments(listing)
    assert [key.key for key in keys] == [
        f"events/{ATTEMPT}/000000.jsonl",
        f"events/{ATTEMPT}/000001.jsonl",
        "events/a0002-0000/000000.jsonl",
    ]
    assert read_segments(listing, keys) == [b"0\n", b"1\n", b"0\n"]
    assert list_recorded_runs(listing) == ["run"]


def test_a_name_that_failed_is_not_used_again(mounted: Host) -> None:
    listing = Listing(mounted.path / "run")
    mounted.fail("write", 5, pattern="*000003.jsonl")
    assert write_segment(listing, ATTEMPT, 3, b"x") == f"events/{ATTEMPT}/000003-r1.jsonl"


def test_a_bucket_that_fails_says_so(mounted: Host) -> None:
    listing = Listing(mounted.path / "run")
    mounted.fail("write", 5, pattern="*events/*", times=1000)
    with pytest.raises(BucketUnavailableError):
        write_segment(listing, ATTEMPT, 0, b"x")


def test_one_answer_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 3)
    listing = Listing(tmp_path / "run")
    large = b"x" * (MAX_SEGMENT_BYTES // 2 + 1)
    for number in range(4):
        write_segment(listing, ATTEMPT, number, large)
    keys = list_segments(listing)
    assert [key.number for key in keys] == [1, 2, 3]
    assert len(read_segments(listing, keys)) == 1
    (tmp_path / "run" / keys[0].key).write_bytes(b"x" * (2 * MAX_SEGMENT_BYTES))
    (found,) = read_segments(listing, keys)
    assert len(found) == MAX_SEGMENT_BYTES


def test_other_names_are_passed_by(tmp_path: Path) -> None:
    listing = Listing(tmp_path / "run")
    key = write_segment(listing, ATTEMPT, 0, b"x")
    folder = (tmp_path / "run" / key).parent
    (folder / "notes.txt").write_text("x")
    (folder.parent / "other").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert [one.key for one in list_segments(listing)] == [key]
    assert list_recorded_runs(listing) == ["run"]
