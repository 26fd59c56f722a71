"""An agent that is PID 1, in a PID namespace of its own, as a container has it."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess  # noqa: TID251 - namespaces are made and entered
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import fleet
from fakes.fleet import Agent, Site

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
PATIENCE_S = 20.0
pytestmark = pytest.mark.slow


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    check_means()
    with fleet.site(tmp_path) as made:
        yield made


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Site]:
    """Without a run, which takes commands to make: enough for a proxy."""
    check_means()
    with fleet.hosts(tmp_path) as started:
        yield Site(started, fleet.free_address())
    fleet.wait_until_none(str(tmp_path))


def check_means() -> None:
    if os.geteuid() or shutil.which("nsenter") is None:
        pytest.skip("needs root, unshare and nsenter")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def state(pid: int) -> str:
    """One letter, as ps shows it; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def first_of(agent: Agent) -> int:
    """PID 1 of the agent's namespace, by its number outside."""
    until(lambda: bool(children(agent.process.pid)))
    (pid,) = children(agent.process.pid)
    return pid


def own_of(agent: Agent) -> int:
    """The agent itself."""
    return children(first_of(agent))[0]


def within(agent: Agent, script: str) -> str:
    """Run a script of the shell in the agent's namespaces."""
    argv = ["nsenter", "--target", str(first_of(agent)), "--pid", "--mount", "sh", "-c", script]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def zombies(agent: Agent) -> list[str]:
    listed = within(agent, "cat /proc/[0-9]*/stat 2>/dev/null || true")
    return [line for line in listed.splitlines() if line.rpartition(")")[2].split()[:1] == ["Z"]]


def engines(site: Site) -> list[str]:
    return [line for line in fleet.processes_naming("-m fakes.vllm") if str(site.folder) in line]


def proxy_apart(site: Site) -> Agent:
    return site.proxy(within=APART)


def test_it_is_the_first_process_and_reaps_what_is_given_to_it(bare: Site) -> None:
    agent = proxy_apart(bare)
    assert within(agent, "tr '\\0' ' ' < /proc/1/cmdline").startswith(sys.executable)
    # Each a parent that ends before its children, which then are PID 1's.
    within(agent, "for _ in $(seq 20); do (sleep 0.2 & sh -c 'exit 3' &); done")
    first = first_of(agent)
    until(lambda: len(children(first)) == 1)  # the agent alone
    assert zombies(agent) == []
    os.kill(first, signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert "proxy.stopping signal=SIGTERM" in agent.text()


def test_a_replica_drains_when_the_container_is_stopped(site: Site) -> None:
    proxy = site.proxy()
    replica, staying = site.replica("r1", within=APART), site.replica("r2")
    trainer = site.trainer(20, "--min-replicas=2", "--set=train.fake_rollouts=16")
    proxy.wait_for(r"adapter.acked .*v000003")
    assert zombies(replica) == []
    os.kill(first_of(replica), signal.SIGTERM)
    assert replica.process.wait(PATIENCE_S) == 0
    assert "replica.draining" in replica.text()
    assert trainer.process.wait(60) == 0, trainer.text()
    assert site.counts()["failed"] == 0
    assert staying.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_signals_are_passed_on(bare: Site, number: signal.Signals) -> None:
    agent = proxy_apart(bare)
    os.kill(first_of(agent), number)
    if number is signal.SIGUSR2:
        until(lambda: any((bare.folder / "proxy" / "dumps").glob("*")))
        os.kill(first_of(agent), signal.SIGTERM)
    expected = 128 + number if number is signal.SIGHUP else 0
    assert agent.process.wait(PATIENCE_S) == expected


def test_an_agent_that_is_killed_ends_the_container_with_all_that_is_in_it(site: Site) -> None:
    site.proxy()
    agent = site.replica("r1", within=APART)
    agent.wait_for("vLLM is up")
    assert engines(site)
    os.kill(own_of(agent), signal.SIGKILL)
    assert agent.process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    until(lambda: engines(site) == [])


def test_what_a_command_says_and_its_exit_code_come_through(bare: Site) -> None:
    argv = [*APART, sys.executable, "-m", "asyncgrpo_agent"]
    env = {**os.environ, "PYTHONPATH": str(fleet.ROOT / "agent")}
    done = subprocess.run([*argv, "version"], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.split()[0]) == (0, "asyncgrpo-agent")
    assert subprocess.run([*argv, "--role=none"], capture_output=True, env=env).returncode == 2


def test_ctrl_c_at_a_terminal_comes_once(bare: Site) -> None:
    """`docker run --tty`: the terminal sends it to the group in its foreground."""
    controller, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(fleet.ROOT / "agent")}
    argv = [*APART, sys.executable, "-m", "asyncgrpo_agent", "--role=proxy"]
    log = bare.folder / "terminal.out"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setsid", "--ctty", *argv, "--listen=127.0.0.1:0", f"--state-dir={bare.folder}/p2"],
            stdin=terminal,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        )
    until(lambda: b"proxy.listening" in log.read_bytes())
    os.write(controller, b"\x03")
    assert process.wait(PATIENCE_S) == 0
    assert log.read_text().count("proxy.stopping signal=SIGINT") == 1
    os.close(controller)
    os.close(terminal)
