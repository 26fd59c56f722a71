from pathlib import Path

from asyncgrpo_agent.store.history import History, read


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
