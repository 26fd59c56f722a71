from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE  # noqa: TID251 - the parent is not a child of ours

import pytest
import trio

from asyncgrpo_agent.errors import ChildError
from asyncgrpo_agent.procs.child import Child, inherited, output_of, started

ENV = dict(os.environ)
# Prints its group when it and a child of its own are up and deaf to SIGTERM.
STUBBORN_TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
inner += "sys.stdout.write('up'); sys.stdout.flush(); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE)
grandchild.stdout.read(2)
print(os.getpgrp(), flush=True)
time.sleep(600)
"""
# An agent that runs the program given to it until somebody kills it.
AGENT = """
import os, sys, trio
from asyncgrpo_agent.procs.child import started
async def main():
    argv = [sys.executable, "-c", sys.argv[1]]
    show = lambda line: print(line, flush=True)
    async with started("tree", argv, env=dict(os.environ), on_line=show, grace_s=0.2) as child:
        await child.wait()
trio.run(main)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def members(group: int) -> list[int]:
    """The processes of `group` that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


class FirstLine:
    """A listener that tells when the first line has come."""

    def __init__(self) -> None:
        self.text = ""
        self._came = trio.Event()

    def __call__(self, line: str) -> None:
        self.text = self.text or line
        self._came.set()

    async def wait(self) -> str:
        with trio.fail_after(20):
            await self._came.wait()
        return self.text


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(0.01)


async def test_output_and_status_of_a_child(tmp_path: Path) -> None:
    heard: list[str] = []
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    log_file = tmp_path / "child.log"
    argv = python(code)
    async with started("c", argv, env=ENV, on_line=heard.append, log_file=log_file) as child:
        assert await child.wait() == 3
        assert child.tail() == "out\nerr"
    assert heard == ["out", "err"]
    assert log_file.read_text() == "out\nerr\n"


async def test_status_of_a_killed_child_is_the_signal() -> None:
    async with started("c", python("import os; os.kill(os.getpid(), 9)"), env=ENV) as child:
        assert await child.wait() == -signal.SIGKILL


async def test_child_leads_a_session_and_has_no_other_children_and_no_input() -> None:
    code = (
        "import os, sys; pid = os.getpid(); print(os.getpgrp() == os.getsid(0) == pid,"
        "open(f'/proc/self/task/{pid}/children').read() == '', sys.stdin.read() == '',"
        "sorted(os.listdir('/proc/self/fd')))"
    )
    async with started("c", python(code), env=ENV) as child:
        await child.wait()
    # The fourth descriptor is that of the listing.
    assert child.tail() == "True True True ['0', '1', '2', '3']"


async def test_environment_and_folder_are_those_given(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['ONE'], 'HOME' in os.environ)"
    async with started("c", python(code), env={"ONE": "1"}, cwd=tmp_path) as child:
        await child.wait()
    assert child.tail() == f"{tmp_path} 1 False"


async def test_arguments_arrive_as_they_are() -> None:
    argv = [*python("import sys; print(sys.argv[1:])"), "a b", "", "$HOME", "'\"", "-n"]
    async with started("c", argv, env=ENV) as child:
        await child.wait()
    assert child.tail() == str(argv[3:])


async def test_leaving_the_block_stops_the_child() -> None:
    async with started("c", python("import time; time.sleep(600)"), env=ENV) as child:
        assert child.returncode is None
    assert child.returncode == -signal.SIGTERM
    assert members(child.pid) == []


async def test_stop_kills_a_tree_that_ignores_sigterm_and_may_be_repeated() -> None:
    ready = FirstLine()
    async with started("c", python(STUBBORN_TREE), env=ENV, on_line=ready) as child:
        assert await ready.wait() == str(child.pid)
        assert len(members(child.pid)) == 3  # with the guard
        assert await child.stop(0.05) == -signal.SIGKILL
        assert members(child.pid) == []
        assert await child.stop(0.05) == -signal.SIGKILL


async def test_stop_twice_at_once() -> None:
    argv = python("import time; time.sleep(600)")
    async with started("c", argv, env=ENV) as child, trio.open_nursery() as nursery:
        nursery.start_soon(child.stop, 5)
        nursery.start_soon(child.stop, 5)
    assert child.returncode == -signal.SIGTERM


async def test_polite_child_ends_in_its_own_way() -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        "print('up', flush=True); time.sleep(600)"
    )
    ready = FirstLine()
    async with started("c", python(code), env=ENV, on_line=ready) as child:
        await ready.wait()
        assert await child.stop(20) == 7


async def test_cancelled_block_stops_the_tree() -> None:
    ready = FirstLine()
    child: Child | None = None
    with trio.CancelScope() as scope:
        argv = python(STUBBORN_TREE)
        async with started("c", argv, env=ENV, on_line=ready, grace_s=0.05) as child:
            await ready.wait()
            scope.cancel()
            await child.wait()
    assert scope.cancelled_caught
    assert child is not None
    assert child.returncode == -signal.SIGKILL
    assert members(child.pid) == []


async def test_end_of_the_child_ends_what_it_left_behind() -> None:
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c',"
        "'import time; time.sleep(600)'])"
    )
    async with started("c", python(code), env=ENV) as child:
        assert await child.wait() == 0
        assert members(child.pid) == []


async def test_error_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with started("c", python("import time; time.sleep(600)"), env=ENV):
            raise KeyError("mine")


async def test_error_of_the_listener_ends_the_block_and_the_child() -> None:
    def fail(line: str) -> None:
        raise ValueError(line)

    code = "import time; print('x', flush=True); time.sleep(600)"
    child: Child | None = None
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="x")):
        async with started("c", python(code), env=ENV, on_line=fail) as child:
            await child.wait()
    assert child is not None
    assert child.returncode == -signal.SIGTERM


async def test_program_that_is_not_there() -> None:
    with pytest.raises(ChildError, match="is not an executable file"):
        async with started("c", ["/nowhere/python"], env=ENV):
            pass


async def test_child_that_writes_much_is_not_held_up() -> None:
    code = "for n in range(100_000): print(n)"
    async with started("c", python(code), env=ENV, on_line=lambda _: None) as child:
        with trio.fail_after(20):
            assert await child.wait() == 0
    assert child.tail().endswith("\n99999")


async def test_output_of_a_short_program() -> None:
    argv = python("print('answer')")
    assert await output_of("c", argv, env=ENV, timeout_s=20) == (0, "answer")
    with pytest.raises(ChildError, match=r"did not end within 0\.1 s"):
        await output_of("c", python("import time; time.sleep(600)"), env=ENV, timeout_s=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("program", [STUBBORN_TREE, STUBBORN_TREE.replace("SIG_IGN", "SIG_DFL")])
async def test_killed_agent_leaves_nobody(program: str) -> None:
    env = inherited({"PYTHONPATH": os.pathsep.join(sys.path)})
    agent = await trio.lowlevel.open_process(
        [*python(AGENT), program],
        env=env,
        stdout=PIPE,
    )
    assert agent.stdout is not None
    line = b""
    with trio.fail_after(20):
        while not line.endswith(b"\n"):
            line += await agent.stdout.receive_some()
    group = int(line)
    assert len(members(group)) == 3
    agent.kill()
    await agent.wait()
    await until(lambda: not members(group))
    await agent.stdout.aclose()
