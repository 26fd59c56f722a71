"""`status`, `logs` and `rollouts tail` against a proxy that serves."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess  # noqa: TID251 - tmux is no child of an agent
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from asyncgrpo_agent import cli
from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.config.sections import Proxy as ProxySection
from asyncgrpo_agent.core.replicas import engine_up
from asyncgrpo_agent.procs import child
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.roles.proxy_run import ProxyRun
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.wire import messages as m

UNIX_S = 1_780_000_000.0
PATIENCE_S = 60.0  # an answer that does not come is given up after 20, and the proxy dialled again


@dataclass
class Served:
    """A proxy, and what commands say to it."""

    proxy: Proxy
    address: str
    folder: Path
    capsys: pytest.CaptureFixture[str]
    scope: trio.CancelScope  # of the proxy

    @property
    def run(self) -> ProxyRun:
        return self.proxy.runs.open("demo")

    def join(self, *flags: str) -> str:
        name = str(self.folder / f"join{len(list(self.folder.glob('join*')))}")
        words = ["token", "create", *flags, "--output", name, "--address", self.address]
        assert cli.main([*words, "--state-dir", str(self.folder / "proxy")]) == 0
        self.capsys.readouterr()
        return name

    async def says(self, *words: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of one command."""
        with trio.fail_after(PATIENCE_S):
            code = await trio.to_thread.run_sync(cli.main, list(words))
        out, err = self.capsys.readouterr()
        return code, out, err


@pytest.fixture
async def served(
    tmp_path: Path, nursery: trio.Nursery, capsys: pytest.CaptureFixture[str]
) -> Served:
    identity.ensure_run(tmp_path / "proxy", "demo")
    scope = trio.CancelScope()
    proxy, address = await started(nursery, tmp_path, scope)
    return Served(proxy, address, tmp_path, capsys, scope)


async def started(
    nursery: trio.Nursery,
    folder: Path,
    scope: trio.CancelScope | None = None,
    listen: str = "127.0.0.1:0",
) -> tuple[Proxy, str]:
    agent, section = Agent(state_dir=str(folder / "proxy")), ProxySection(listen=listen)
    proxy = Proxy(Config(role="proxy", agent=agent, proxy=section))

    async def serve(task_status: trio.TaskStatus[str]) -> None:
        with scope or trio.CancelScope():
            await proxy.serve(task_status)

    return proxy, await nursery.start(serve)


def step(number: int) -> dict[str, Any]:
    values = {"reward": 0.1, "perf/step_s": 10.0, "perf/rollout_wait_s": 6.0}
    return {"t": UNIX_S, "kind": "metrics", "step": number, "max_steps": 50, "values": values}


def trained(run: ProxyRun) -> None:
    """Thirty steps, one replica with a name that a terminal would obey, no trainer."""
    replica = run.fleet.join("r\x1b[1", "i", 8, trio.current_time())
    run.note(engine_up(replica, trio.current_time()))
    run.attempt = "a0001-56f0"
    rows = [step(number) for number in range(1, 31)]
    run.story.take(m.Facts("h", 0, 10, rows), {})


async def test_status_of_one_run_and_of_all(served: Served) -> None:
    trained(served.run)
    join = served.join("--role=viewer", "--run=demo")
    code, out, _ = await served.says("status", "--join", join)
    assert code == 1
    assert "step 30/50" in out
    assert "Generation-bound: the trainer waited 60% of the last 20 steps" in out
    assert "! The trainer is not connected." in out
    assert "r�[1 is READY" in out
    code, out, _ = await served.says("status", "--json", "--join", join)
    shown = json.loads(out)
    assert (shown["healthy"], shown["run"]["step"]) == (False, 30)
    assert "The trainer is not connected." in shown["faults"]
    served.run.finished = "all steps are done"
    assert (await served.says("status", "--join", join))[0] == 0
    served.proxy.runs.open("other")
    everything = served.join("--role=viewer")
    code, out, _ = await served.says("status", "--join", everything)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["run", "demo", "other"]
    code, _, err = await served.says("logs", "--join", everything)
    assert code == 2
    assert "Name one of them: demo, other" in err


async def test_who_may_not_look_is_told_what_to_do(served: Served) -> None:
    join = served.join("--role=viewer", "--run=demo")
    code, _, err = await served.says("status")
    assert code == 78
    assert "token create --role viewer" in err
    code, _, err = await served.says(
        "status", "--join", served.join("--role=replica", "--run=demo")
    )
    assert code == 78
    assert "the join is for a replica" in err
    code, _, err = await served.says("status", "other", "--join", join)
    assert code == 1
    assert "there is nothing of that name" in err
    words = ["rollouts", "tail", "demo", "--join", join]
    served.run.story.say("run", "info", "x.y", "hello")
    code, _, err = await served.says(*words)
    assert code == 78
    assert "--rollouts" in err
    code, _, err = await served.says("status", "--proxy", "127.0.0.1:1", "--join", join)
    assert code == 1
    assert "127.0.0.1:1" in err


async def test_logs_and_rollouts_the_newest_last(served: Served) -> None:
    run = served.run
    for number in range(3):
        run.story.say("run", "info", "run.told", f"number {number}")
        run.story.sampled(
            m.SampledRollout(
                UNIX_S + number, f"{number}+1?", "\x1b]0;x", 3, {"exact": 1.0}, 7, "r1"
            )
        )
    run.story.say("alert", "error", "alert.raised", "The ratio.")
    join = served.join("--role=viewer", "--run=demo", "--rollouts")
    _, out, _ = await served.says("logs", "--limit=2", "--join", join)
    assert [line.split(maxsplit=2)[1:] for line in out.splitlines()] == [
        ["info", "run.told           number 2"],
        ["error", "alert.raised       The ratio."],
    ]
    _, out, _ = await served.says("logs", "--kind=run", "--json", "--join", join)
    assert [json.loads(line)["text"] for line in out.splitlines()] == [
        "number 0", "number 1", "number 2"
    ]  # fmt: skip
    code, out, _ = await served.says("rollouts", "tail", "--limit=1", "--join", join)
    assert code == 0
    assert "v7  r1  3 tokens  0.0 s  exact 1.000\n2+1?\n�]0;x" in out
    assert (await served.says("rollouts", "--join", join))[0] == 2


async def test_logs_follow_what_comes_also_over_a_proxy_that_starts_again(
    tmp_path: Path, nursery: trio.Nursery, served: Served
) -> None:
    said = tmp_path / "said"
    join = served.join("--role=viewer", "--run=demo")
    words = [sys.executable, "-m", "asyncgrpo_agent", "logs", "-f", "--join", join]
    environ = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}

    async def hears(proxy: Proxy, life: str) -> None:
        story = proxy.runs.open("demo").story
        story.say("run", "info", "x.y", f"before {life}")
        with trio.move_on_after(PATIENCE_S):
            while not story.watchers:  # noqa: ASYNC110 - it tells nobody
                await trio.sleep(0.01)
            story.say("run", "info", "x.y", f"after {life}")
            while f"after {life}" not in said.read_text():  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert f"after {life}" in said.read_text()

    async with child.started("logs", words, env=environ, log_file=said, grace_s=5.0):
        await hears(served.proxy, "one")
        await served.proxy.leave()
        served.scope.cancel()
        again, _ = await started(nursery, tmp_path, listen=served.address)
        with trio.fail_after(PATIENCE_S):  # nobody has told it of the run
            while "there is nothing of that name" not in said.read_text():  # noqa: ASYNC110
                await trio.sleep(0.01)
        await hears(again, "two")
    told = [line.split()[-2:] for line in said.read_text().splitlines() if " info " in line]
    assert told == [["before", "one"], ["after", "one"], ["before", "two"], ["after", "two"]]
    assert "dialling again" in said.read_text()


async def test_status_on_a_terminal_is_drawn_again_and_again(
    tmp_path: Path, served: Served
) -> None:
    if shutil.which("tmux") is None:
        assert "CI" not in os.environ, "CI installs tmux"
        pytest.skip("tmux is not installed")
    trained(served.run)
    join = served.join("--role=viewer", "--run=demo")
    words = [sys.executable, "-m", "asyncgrpo_agent", "status", "--watch", "--join", join]
    environ = f"PYTHONPATH={Path(cli.__file__).parents[1]}"

    async def tmux(*command: str) -> str:
        argv = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *command]
        run = partial(
            subprocess.check_output, argv, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S
        )
        said: str = await trio.to_thread.run_sync(run)
        return said

    shown = ""
    line = shlex.join(["env", environ, *words])
    await tmux("new-session", "-d", "-x", "160", "-y", "40", line)
    try:
        with trio.fail_after(PATIENCE_S):
            while "step 30/50" not in shown:
                shown = await tmux("capture-pane", "-p")
            served.run.story.take(m.Facts("h", 10, 20, [step(31)]), {})
            while "step 31/50" not in shown:
                shown = await tmux("capture-pane", "-p")
    finally:
        await tmux("kill-server")
    (tmp_path / "screen.txt").write_text(shown)
    assert shown.count("step 3") == 1
    assert "run demo a0001-56f0  waiting  step 31/50  reward 0.100" in shown
