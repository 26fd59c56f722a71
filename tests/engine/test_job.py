"""The job file: decoded whole, or refused with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_engine.job import Eval, read_job
from asyncgrpo_engine.problems import Problem, RefusedError, error_line, unknown_names

JOB: dict[str, Any] = {
    "model": "/m",
    "dataset": "/d.jsonl",
    "rewards": ["a:b"],
    "output_dir": "/o",
    "gateway": "http://127.0.0.1:1",
}


def write(folder: Path, table: object) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(table))
    return path


def test_a_full_job(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, JOB | {"grpo": {"max_steps": 3}, "eval": {"samples": 9}}))
    assert job.grpo == {"max_steps": 3}
    assert job.eval == Eval(samples=9)
    assert job.eval_data == job.training_data
    assert job.training_data.where == "train.dataset '/d.jsonl'"
    assert not job.training_data.is_on_hub


def test_all_problems_at_once(tmp_path: Path) -> None:
    table = {key: value for key, value in JOB.items() if key != "model"}
    with pytest.raises(RefusedError) as refused:
        read_job(write(tmp_path, table | {"eval": {"sampels": 1}, "gatewey": ""}))
    assert refused.value.problems == [
        Problem(
            what="the job has no field 'gatewey'",
            where="job.gatewey",
            fix="did you mean 'gateway'?",
        ),
        Problem(what="'model' is missing", where="job"),
        Problem(
            what="the job has no field 'sampels'",
            where="eval.sampels",
            fix="did you mean 'samples'?",
        ),
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"eval": 3}'])
def test_what_is_no_job(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(RefusedError):
        read_job(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RefusedError):
        read_job(tmp_path / "none.json")


def test_the_line_that_the_agent_reads() -> None:
    line = error_line([Problem(what="w", where="x", fix="f")])
    assert json.loads(line) == {
        "error": {"problems": [{"what": "w", "where": "x", "fix": "f"}]},
    }
    assert "\n" not in line


def test_names_that_resemble_nothing() -> None:
    (problem,) = unknown_names(["zzz"], ["max_steps"], section="train", owner="X")
    assert problem.fix == "remove it"
