from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.procs.notice import noticed

PATIENCE_S = 10.0


async def test_a_command_is_run_until_it_ends_with_0(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    script = f'echo x >> {tries}; [ "$(wc -l < {tries})" -ge 3 ]'
    with trio.fail_after(PATIENCE_S):
        await noticed(["/bin/sh", "-c", script], 0.01)
    assert tries.read_text() == "x\n" * 3


async def test_a_command_may_wait_itself(tmp_path: Path, nursery: trio.Nursery) -> None:
    notice = tmp_path / "notice"
    script = f"until [ -e {notice} ]; do sleep 0.02; done"
    with trio.fail_after(PATIENCE_S):
        nursery.start_soon(trio.Path(notice).touch)
        await noticed(["/bin/sh", "-c", script], 60)


async def test_one_that_cannot_be_started_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with trio.move_on_after(0.3) as scope:
        await noticed(["/nowhere/notice"], 0.01)
    assert scope.cancelled_caught
    assert caplog.text.count("notice.unknown") == 1
