import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncgrpo_agent.store.history import History, read


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
