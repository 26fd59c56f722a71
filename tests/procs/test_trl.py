from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import EXIT_CONFIG
from asyncgrpo_agent.procs.child import output_of
from asyncgrpo_agent.procs.trl import Launch, config_error, package_folder, train_command

PROBLEM = {"what": "no file", "where": "train.dataset", "fix": "Give one"}


def report(*problems: dict[str, str]) -> str:
    return json.dumps({"error": {"problems": problems}})


def test_command_names_the_job_and_shows_no_secrets(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    argv, additions = train_command(
        "/engine/python",
        job,
        check=False,
        python_path=["/rewards"],
        scratch=tmp_path,
        launch=Launch(),
    )
    assert argv == ["/engine/python", "-m", "asyncgrpo_engine.train", "--config", str(job)]
    assert additions["PYTHONPATH"].split(":") == [str(tmp_path / "engine-path"), "/rewards"]
    assert additions["HF_HUB_OFFLINE"] == "1"


def test_check_is_a_flag(tmp_path: Path) -> None:
    argv = command(tmp_path, check=True, launch=Launch(processes=4))
    assert argv[1:3] == ["-m", "asyncgrpo_engine.train"]
    assert argv[-1] == "--check"


def command(scratch: Path, *, check: bool, launch: Launch) -> list[str]:
    return train_command(
        "python", scratch, check=check, python_path=[], scratch=scratch, launch=launch
    )[0]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file=fsdp.yaml"]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (
            Launch(processes=4),
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"],
        ),
        (Launch(accelerate_config="fsdp.yaml"), ACCELERATE),
        (
            Launch(processes=4, accelerate_config="fsdp.yaml"),
            [*ACCELERATE, "--num_processes=4"],
        ),
    ],
)
def test_several_processes_have_a_launcher(
    tmp_path: Path, launch: Launch, words: list[str]
) -> None:
    argv = command(tmp_path, check=False, launch=launch)
    begin = ["python", *words, "-m", "asyncgrpo_engine.train"]
    assert argv[: len(begin)] == begin


async def test_engine_python_finds_the_engine_package_and_no_other_of_ours(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u;"
        "print([bool(u.find_spec(f'asyncgrpo_{name}')) for name in ('engine', 'agent')])"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package_folder(tmp_path))}
    # -S and a foreign folder: nothing but PYTHONPATH leads to our packages.
    argv = [sys.executable, "-S", "-c", f"import os; os.chdir('/'); {code}"]
    assert await output_of("python", argv, env=env, timeout_s=20) == (0, "[True, False]")


def test_package_folder_can_be_made_again(tmp_path: Path) -> None:
    assert package_folder(tmp_path) == package_folder(tmp_path)
    assert [path.name for path in (tmp_path / "engine-path").iterdir()] == ["asyncgrpo_engine"]


def test_frozen_agent_takes_the_package_from_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_MEIPASS", str(tmp_path / "bundle"), raising=False)
    link = package_folder(tmp_path) / "asyncgrpo_engine"
    assert link.readlink() == tmp_path / "bundle/asyncgrpo_engine"


def test_problems_of_the_child_become_one_error() -> None:
    other = {"what": "no function", "where": "train.rewards", "fix": ""}
    error = config_error(EXIT_CONFIG, f"some warning\n{report(PROBLEM, other)}")
    assert error is not None
    assert error.exit_code == EXIT_CONFIG
    assert str(error) == "train.dataset: no file. Give one; train.rewards: no function"


def test_lines_after_the_report_do_not_hide_it() -> None:
    error = config_error(EXIT_CONFIG, f"{report(PROBLEM)}\nException ignored in: <_io.TextIO>")
    assert error is not None
    assert "train.dataset" in str(error)


@pytest.mark.parametrize(
    "tail",
    ["", "Traceback ...", '{"error"', '{"error": "text"}', '{"error": {"problems": ["x", 1]}}'],
)
def test_report_that_does_not_parse_is_still_a_configuration_error(tail: str) -> None:
    error = config_error(EXIT_CONFIG, tail)
    assert error is not None
    assert "refused its configuration" in str(error)


@pytest.mark.parametrize("code", [0, 1, 143, -9])
def test_other_exit_codes_are_no_configuration_errors(code: int) -> None:
    assert config_error(code, report(PROBLEM)) is None
