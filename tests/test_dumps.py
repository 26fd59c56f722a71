"""SIGUSR2 writes down what an agent is doing, also one that never comes back to its loop."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent import dumps, logs
from asyncgrpo_agent.logs import Log


async def waits_for_ever() -> None:
    await trio.sleep_forever()


def dump_of(state_dir: Path) -> str:
    return (state_dir / dumps.FOLDER / f"{os.getpid()}.txt").read_text()


async def test_tasks_are_a_tree_with_their_stacks(tmp_path: Path) -> None:
    with dumps.on_signal(tmp_path, "replica"), dumps.section("link", lambda: "up since noon"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits_for_ever, name="the patient one")
            await trio.testing.wait_all_tasks_blocked()
            (found,) = dumps.running(tmp_path / dumps.FOLDER)
            assert (found.pid, found.role) == (os.getpid(), "replica")
            os.kill(found.pid, dumps.SIGNAL)
            nursery.cancel_scope.cancel()
        said = dump_of(tmp_path)
        assert "role replica, pid" in said
        assert "the patient one\n" in said
        assert re.search(r"test_dumps.py:\d+ waits_for_ever", said)
        assert "=== link\nup since noon" in said
        assert "thread 0x" in found.threads.read_text()
    assert list((tmp_path / dumps.FOLDER).iterdir()) == []
    assert signal.getsignal(dumps.SIGNAL) == signal.SIG_DFL


def test_a_part_that_fails_is_said_and_lines_of_the_log_are_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str:
        raise RuntimeError("no link")

    logs.set_up(as_json=True, level="INFO")
    Log(__name__).info("adapter.loaded", adapter="agrpo1." + "x" * 40)
    with dumps.on_signal(tmp_path, "proxy"), dumps.section("link", broken):
        os.kill(os.getpid(), dumps.SIGNAL)
        said = dump_of(tmp_path)
    assert "=== tasks\nno task runs" in said
    assert "=== link\n(RuntimeError: no link)" in said
    assert "INFO adapter.loaded adapter=***" in said


def test_what_a_killed_agent_left_is_cleared_and_no_other_process_is_taken_for_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / dumps.FOLDER
    folder.mkdir()
    reused = {"pid": os.getppid(), "started": 1, "role": "proxy"}  # its number went to another
    (folder / f"{os.getppid()}.json").write_text(json.dumps(reused))
    (folder / "99999999.threads").write_text("")
    (folder / "notes.md").write_text("mine")
    assert dumps.running(folder) == []
    with dumps.on_signal(tmp_path, "proxy"):
        assert {path.stem for path in folder.iterdir()} == {str(os.getpid()), "notes"}


def test_a_state_folder_that_cannot_be_written_costs_only_the_dumps(tmp_path: Path) -> None:
    (tmp_path / dumps.FOLDER).write_text("a file")
    with dumps.on_signal(tmp_path, "proxy"):
        assert signal.getsignal(dumps.SIGNAL) == signal.SIG_DFL
