import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen  # noqa: TID251 - an agent that is killed is no child of ours

import pytest
import trio

from asyncgrpo_agent.procs import worker
from asyncgrpo_agent.procs.program import worker_environment
from fakes.processes import runs

PATIENCE_S = 10.0
# An agent with a worker, until somebody kills it.
AGENT = """
import trio
from asyncgrpo_agent.procs import worker
async def main():
    print((await worker.start("mount-worker")).pid, flush=True)
    await trio.sleep_forever()
trio.run(main)
"""


@contextmanager
def agent() -> Iterator[Popen[bytes]]:
    command = [sys.executable, "-c", AGENT]
    with Popen(command, env=worker_environment(), stdout=PIPE) as process:
        yield process
        process.kill()


async def test_it_ends_when_the_agent_is_killed() -> None:
    with agent() as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert runs(pid)
        process.kill()
        with trio.fail_after(PATIENCE_S):
            while runs(pid):  # noqa: ASYNC110 - the kernel tells nobody
                await trio.sleep(0.01)


async def test_its_last_words_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    process = await worker.start("mount-worker")
    await process.send(b"\x00\x00\x00\x02no")
    with trio.fail_after(PATIENCE_S):
        await process.relay_errors()
    assert "mount_worker.deaf" in capsys.readouterr().err
    assert await process.receive() == b""
    assert await process.ended() == 1
    process.kill()


async def test_one_that_was_killed_is_not_waited_for() -> None:
    process = await worker.start("mount-worker")
    process.kill()
    process.kill()
    assert await process.ended() == -9
    with pytest.raises(trio.ClosedResourceError):
        await process.receive()


async def test_one_that_nobody_waits_for_is_reaped_when_the_next_one_starts() -> None:
    process = await worker.start("mount-worker")
    pid = process.pid
    process.kill()
    del process
    gc.collect()  # a child that is forgotten while it lives is warned of here
    await trio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{pid}").exists()
    after = await worker.start("mount-worker")
    assert not Path(f"/proc/{pid}").exists()
    after.kill()
    assert await after.ended() == -9
