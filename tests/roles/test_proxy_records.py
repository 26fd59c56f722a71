"""What a proxy keeps of its trainers' words."""

from __future__ import annotations

from pathlib import Path

from asyncgrpo_agent.core.run_record import MAX_RECORD_BYTES
from asyncgrpo_agent.roles.proxy_records import RunRecords
from asyncgrpo_agent.store import run_records


def test_the_newest_is_kept_also_by_a_proxy_that_restarts(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    assert records.of("demo") == b""
    records.keep("demo", "first")
    records.keep("demo", "second")
    records.keep("demo", "")  # an older trainer says nothing
    assert records.of("demo") == RunRecords(tmp_path).of("demo") == b"second"
    assert records.of("other") == b""


def test_one_that_is_too_long_is_not(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.keep("demo", "x" * (MAX_RECORD_BYTES + 1))
    assert records.of("demo") == b""


def test_a_disk_that_fails_costs_the_next_proxy_the_record(tmp_path: Path) -> None:
    (tmp_path / "proxy").touch()  # no folder
    records = RunRecords(tmp_path)
    records.keep("demo", "first")
    assert records.of("demo") == b"first"
    assert not run_records.of_proxy(tmp_path, "demo").exists()
