from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.host_bindings import (
    MAX_NAMES,
    SEEN_EVERY_S,
    UNSEEN_S,
    HostBindings,
)

START_S = 1_000_000.0


def saved(bindings: HostBindings) -> None:
    bindings.save(bindings.take_unsaved())


def test_they_survive_a_restart(tmp_path: Path) -> None:
    bindings = HostBindings(tmp_path, START_S)
    assert bindings.keys("demo") == {}
    assert bindings.bind("demo", "r1", "aa", (), START_S)
    assert bindings.bind("other", "r1", "bb", (), START_S)
    assert bindings.unsaved
    saved(bindings)
    assert not bindings.unsaved
    again = HostBindings(tmp_path, START_S + 9)
    assert (again.keys("demo"), again.keys("other")) == ({"r1": "aa"}, {"r1": "bb"})
    assert not again.unsaved
    assert stat.S_IMODE(again.path.stat().st_mode) == 0o600
    assert json.loads(again.path.read_bytes())["demo"] == {
        "r1": {"key": "aa", "first_seen_unix_s": START_S, "last_seen_unix_s": START_S}
    }


def test_when_a_host_was_seen_is_written_once_a_day(tmp_path: Path) -> None:
    bindings = HostBindings(tmp_path, START_S)
    bindings.bind("demo", "r1", "aa", (), START_S)
    saved(bindings)
    bindings.seen("demo", ["r1", "unbound"], START_S + SEEN_EVERY_S - 1)
    bindings.seen("unknown", ["r1"], START_S + SEEN_EVERY_S)
    assert not bindings.unsaved
    bindings.seen("demo", ["r1"], START_S + SEEN_EVERY_S)
    assert bindings.unsaved
    row = json.loads(bindings.take_unsaved())["demo"]["r1"]
    assert (row["first_seen_unix_s"], row["last_seen_unix_s"]) == (START_S, START_S + SEEN_EVERY_S)


def test_a_name_unseen_for_a_month_is_given_up_at_a_start(tmp_path: Path) -> None:
    bindings = HostBindings(tmp_path, START_S)
    bindings.bind("demo", "r1", "aa", (), START_S)
    bindings.bind("demo", "r2", "bb", (), START_S + 1)
    bindings.bind("ended", "r1", "aa", (), START_S)
    saved(bindings)
    again = HostBindings(tmp_path, START_S + UNSEEN_S)
    assert again.keys("demo") == {"r2": "bb"}
    assert again.unsaved
    assert "ended" not in json.loads(again.take_unsaved())


def test_a_full_run_gives_up_what_is_old_and_not_live(tmp_path: Path) -> None:
    bindings = HostBindings(tmp_path, START_S)
    for number in range(MAX_NAMES):
        assert bindings.bind("demo", f"r{number}", "aa", (), START_S + number)
    assert not bindings.bind("demo", "new", "bb", (), START_S + 10_000)
    assert bindings.bind("other", "new", "bb", (), START_S + 10_000)
    assert "new" not in bindings.keys("demo")
    assert bindings.bind("demo", "new", "bb", {"r0", "r1"}, START_S + UNSEEN_S + 2)
    names = list(bindings.keys("demo"))
    assert names[:3] == ["r0", "r1", "r3"]
    assert len(names) == MAX_NAMES


@pytest.mark.parametrize("text", ["{", "[]", '{"demo": {"r1": {"key": "aa"}}}', '{"demo": []}'])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "proxy").mkdir()
    path = tmp_path / "proxy" / "hosts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hosts\.json: does not parse: .*or delete it"):
        HostBindings(tmp_path, START_S)
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "proxy" / "hosts.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"hosts\.json: cannot be read"):
        HostBindings(tmp_path, START_S)


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "proxy" / "hosts.json.new").mkdir(parents=True)  # in the way of every write
    bindings = HostBindings(tmp_path, START_S)
    assert bindings.bind("demo", "r1", "aa", (), START_S)
    with pytest.raises(OSError, match=r"hosts\.json\.new"):
        saved(bindings)
    assert bindings.keys("demo") == {"r1": "aa"}
