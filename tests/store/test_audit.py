from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.store import audit
from asyncgrpo_agent.store.audit import AuditLog, audit_file


def records(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit_file(state).read_text().splitlines()]


def test_a_record_has_its_time_and_is_for_the_owner_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    AuditLog(state).record("token.created", 5.25, token="ab12", uses=None, expires_unix_s=7.0)
    AuditLog(state).record("token.revoked", 6.0, token="ab12")
    assert records(state) == [
        {"t": 5.25, "event": "token.created", "token": "ab12", "uses": None, "expires_unix_s": 7.0},
        {"t": 6.0, "event": "token.revoked", "token": "ab12"},
    ]
    assert audit_file(state).stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700


def test_what_peers_say_is_bounded_and_stays_on_its_line(tmp_path: Path) -> None:
    AuditLog(tmp_path).record("link.refused", 1.0, name="a\nb\u2028\x1b[31m" * 1000)
    assert audit_file(tmp_path).read_bytes().count(b"\n") == 1
    assert audit_file(tmp_path).read_bytes().isascii()
    (found,) = records(tmp_path)
    assert len(found["name"]) == audit.MAX_CHARACTERS


def test_the_files_are_bounded_and_the_newest_records_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 1000)
    kept = AuditLog(tmp_path)
    for number in range(500):
        kept.record("link.refused", 1.0, number=number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[-audit.KEPT :] == [f"audit.jsonl.{n}" for n in range(1, audit.KEPT + 1)]
    assert len(files) <= audit.KEPT + 1
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    kept.record("link.refused", 1.0, number=500)
    numbers = [
        json.loads(line)["number"]
        for n in range(audit.KEPT, -1, -1)
        for line in (tmp_path / f"audit.jsonl{f'.{n}' if n else ''}").read_text().splitlines()
    ]
    assert numbers == list(range(501))[-len(numbers) :]


def test_those_who_write_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 4000)
    logs = [AuditLog(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: logs[n % 4].record("replica.joined", 1.0, n=n), range(200)))
    lines = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert sorted(json.loads(line)["n"] for line in lines) == list(range(200))


def test_a_disk_that_fails_costs_records_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit_file(tmp_path).mkdir()
    kept = AuditLog(tmp_path)
    for _ in range(3):
        kept.record("replica.joined", 1.0)
    assert caplog.text.count("audit.unwritten") == 1
    audit_file(tmp_path).rmdir()
    kept.record("replica.joined", 2.0)
    assert [one["t"] for one in records(tmp_path)] == [2.0]


def test_a_line_that_was_cut_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, write = AuditLog(tmp_path), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        kept.record("replica.joined", 1.0)
    kept.record("replica.joined", 2.0)
    cut, whole = audit_file(tmp_path).read_text().splitlines()
    assert len(cut) == 10
    assert json.loads(whole)["t"] == 2.0


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    audit_file(tmp_path).symlink_to(tmp_path / "other")
    AuditLog(tmp_path).record("replica.joined", 1.0)
    assert (tmp_path / "other").read_text() == "mine"
