from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.host_keys import ensure_host_key, host_key_file


def public(state: Path, run: str = "demo") -> bytes:
    return ensure_host_key(state, run).public_key().public_bytes_raw()


def test_it_is_made_once_for_a_run_and_for_its_owner_alone(tmp_path: Path) -> None:
    made = public(tmp_path / "state")
    assert public(tmp_path / "state") == made
    assert public(tmp_path / "state", "other") != made
    assert public(tmp_path / "elsewhere") != made
    path = host_key_file(tmp_path / "state", "demo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_two_processes_that_start_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(public, [tmp_path] * 8))) == 1


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab" * 31, "ab" * 33, "\udcff"])
def test_a_damaged_key_is_named_and_never_replaced(tmp_path: Path, text: str) -> None:
    public(tmp_path)
    path = host_key_file(tmp_path, "demo")
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"demo\.key: does not hold a host key\. .*delete it"):
        ensure_host_key(tmp_path, "demo")
    assert path.read_bytes() == text.encode(errors="surrogateescape")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    public(tmp_path)
    host_key_file(tmp_path, "demo").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        ensure_host_key(tmp_path, "demo")


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be kept: .*--state-dir"):
        ensure_host_key(tmp_path / "state", "demo")
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "demo.key.new").mkdir()  # in the way of every write
    with pytest.raises(ConfigError, match="cannot be kept"):
        ensure_host_key(tmp_path, "demo")
