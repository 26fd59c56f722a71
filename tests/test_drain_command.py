"""`drain` at the command line; what it does is in tests/roles/test_proxy_drain.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.store import drain_orders


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ASYNCGRPO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ASYNCGRPO_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_no_proxy_has_run_here(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    assert cli.main(["drain", "r1"]) == 1
    shown = capsys.readouterr().err
    assert f"{state}: no proxy has run with this state folder. Is the proxy up" in shown


def test_no_proxy_runs_now(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    drain_orders.open_folder(other)
    words = ["drain", "r1", "--timeout", "0.1", "--state-dir", str(other)]
    assert cli.main(words) == 1
    assert f"{other}: no proxy answered within 0.1 s" in capsys.readouterr().err
    assert list(drain_orders.orders_folder(other).iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["drain"], "required: NAME"),
        (["drain", "r1", "r2"], "unrecognized arguments: r2"),
        (["drain", "r1", "--timeout", "0"], "'0' is no number of seconds"),
        (["drain", "r1", "--timeout", "inf"], "'inf' is no number of seconds"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert cli.main(words) == 2
    assert text in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["drain", "--help"])
    assert capsys.readouterr().out.startswith("usage: asyncgrpo-agent drain NAME")
