from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.core.segments import encode, line_of
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.segments import write_segment
from fakes.histories import simulated


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", "ASYNCGRPO_AGENT_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


def keep_local(state_dir: Path, run: str = "demo") -> None:
    path = state_dir / "trainer" / run / "history.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in simulated(40, resume_at=20)))


def keep_in_bucket(bucket: Path, run: str = "demo") -> None:
    lines = [line for one in simulated(40, resume_at=20) if (line := line_of(one))]
    data = encode(lines, history="h", start=0, end=9, run=run, attempt="a0001-7f3c")
    bucket.mkdir(exist_ok=True)
    write_segment(Listing(bucket / run), "a0001-7f3c", 0, data)


def test_a_report_from_the_trainers_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_local(tmp_path / "state")
    assert cli.main(["report", "demo", "--state-dir=state"]) == 0
    html = (tmp_path / "demo-report" / "report.html").read_text()
    assert "40 of 40, in 2 starts of the trainer" in html
    assert list((tmp_path / "demo-report").iterdir()) == [tmp_path / "demo-report" / "report.html"]
    assert "demo-report/report.html" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bucket_alone_gives_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_local(tmp_path / "state")
    keep_in_bucket(tmp_path / "bucket")
    assert cli.main(["report", "--state-dir=state", "--output=local.html"]) == 0
    assert cli.main(["report", "--bucket=bucket", "--output=out.html", "--png"]) == 0
    local, remote = ((tmp_path / name).read_text() for name in ("local.html", "out.html"))
    assert local.partition("</p>")[2] == remote.partition("</p>")[2]  # but for the time
    images = sorted(path.name for path in tmp_path.glob("out-*.png"))
    assert {"out-reward.png", "out-sync.png", "out-charts.png"} <= set(images)
    assert (tmp_path / "out-reward.png").read_bytes().startswith(b"\x89PNG")
    assert f"and {len(images)} images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["report"], 1, "has no history of any run"),
        (["report", "demo"], 1, "has no history of run demo"),
        (["report", "demo", "--bucket=bucket"], 1, "has no history of run demo"),
        (["report", "--state-dir=two"], 2, "has 2 runs: a, b. Name one"),
        (["report", "DEMO"], 2, "'DEMO' is no name of a run"),
        (["report", "demo", "--bucket=none"], 78, "is not there"),
    ],
)
def test_what_cannot_be_told_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    (tmp_path / "bucket").mkdir()
    keep_local(tmp_path / "two", "a")
    keep_local(tmp_path / "two", "b")
    assert cli.main(words) == code
    assert text in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_local(tmp_path / "state")
    (tmp_path / "file").write_text("")
    assert cli.main(["report", "--state-dir=state", "--output=file/x.html"]) == 1
    assert "cannot be written" in capsys.readouterr().err
