import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncgrpo_agent.store.history import PIECE_BYTES, History, name_of, read, read_piece


def test_what_a_full_disk_refuses_does_not_come_back_later(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        with _full_disk(), pytest.raises(OSError, match="File too large"):
            history.record("phase", 1.0, phase="x" * 5000)
        history.record("metrics", 2.0)
    assert [record["kind"] for record in read(path)] == ["metrics"]


@contextmanager
def _full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_records_come_back_in_order_without_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "history.jsonl"
    with History(path) as history:
        history.record("phase", 1.5, phase="loading")
    with History(path) as history:
        history.record("metrics", 2.0, values={"reward": 0.5})
    with path.open("a") as file:
        file.write('{"t": 3.0, "ki')
    assert list(read(path)) == [
        {"t": 1.5, "kind": "phase", "phase": "loading"},
        {"t": 2.0, "kind": "metrics", "values": {"reward": 0.5}},
    ]


def test_a_history_is_read_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert name_of(path) == ""
    with History(path) as history:
        for number in range(500):
            history.record("metrics", float(number), step=number, note="x" * 200)
        with path.open("ab") as file:
            file.write(b'{"t": 1, "cut')
        steps, at = [], 0
        while (piece := read_piece(path, at)).end > at:
            assert piece.end - piece.start <= PIECE_BYTES
            steps += [record["step"] for record in piece.records]
            at = piece.end
        assert steps == list(range(500))
        history.record("phase", 1.0, phase="done")
        assert read_piece(path, at).records == []  # the line that was cut makes no sense
        name = name_of(path)
        assert len(name) == 16
    path.unlink()
    with History(path) as history:
        history.record("phase", 2.0, phase="loading")
    assert name_of(path) not in ("", name)


def test_a_line_that_is_longer_than_a_piece_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        history.record("setup", 1.0, text="x" * (2 * PIECE_BYTES))
    assert read_piece(path, 0).records[0]["kind"] == "setup"
