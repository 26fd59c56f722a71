"""Records of runs on disk."""

from __future__ import annotations

from pathlib import Path

from asyncgrpo_agent.store import run_records


def test_a_record_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    for path in (run_records.of_proxy(tmp_path, "demo"), run_records.of_trainer(tmp_path, "demo")):
        assert run_records.read(path) == b""
        run_records.write(path, b"sealed")
        assert run_records.read(path) == b"sealed"
        assert path.stat().st_mode & 0o077 == 0
