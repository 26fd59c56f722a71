import sys
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.roles.replica_exit import call_on_exit, until_idle


class Work:
    """What a replica does, as `until_idle` asks."""

    def __init__(self) -> None:
        self.now = (False, 0, 0)

    def __call__(self) -> tuple[bool, int, int]:
        return self.now


async def idle_after(work: Work, changes: list[tuple[float, tuple[bool, int, int]]]) -> float:
    """When it was found idle for 60 s, while `work` changes at these times."""
    began = trio.current_time()

    async def play() -> None:
        for at, what in changes:
            await trio.sleep_until(began + at)
            work.now = what

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        await until_idle(60, work)
        nursery.cancel_scope.cancel()
    return trio.current_time() - began


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        ([(600, (True, 0, 0))], 660),  # vLLM took ten minutes
        ([(0.5, (True, 0, 0)), (30, (True, 1, 1)), (200, (True, 0, 1))], 260),  # a long rollout
        ([(0.5, (True, 0, 0)), (30.5, (True, 0, 1))], 91),  # one too short to be seen running
        ([(0.5, (True, 0, 0)), (30, (False, 0, 0)), (40, (True, 0, 0))], 100),  # it restarted
    ],
)
async def test_idle_time_is_counted_from_the_last_work(
    autojump_clock: MockClock, changes: list[tuple[float, tuple[bool, int, int]]], expected_s: float
) -> None:
    assert await idle_after(Work(), changes) == pytest.approx(expected_s, abs=2)


async def test_without_a_limit_it_stays(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1e6) as scope:
        await until_idle(0, lambda: (True, 0, 0))
    assert scope.cancelled_caught


async def test_the_command_sees_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("ASYNCGRPO_JOIN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "hush-7f3c")
    monkeypatch.setenv("PLATFORM_HOST", "h1")
    script = "import os, sys; open(sys.argv[1], 'w').write(repr(dict(os.environ)))"
    await call_on_exit([sys.executable, "-c", script, str(tmp_path / "seen")])
    seen = (tmp_path / "seen").read_text()
    assert "'PLATFORM_HOST': 'h1'" in seen
    assert "hush-7f3c" not in seen
    assert "on_exit.called" in caplog.text


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["sh", "-c", "echo no such job; exit 3"], "it ended with exit code 3"),
        (["/nowhere/stop"], "/nowhere/stop is not an executable file"),
        (["sleep", "100"], "did not end within 0.3 s"),
    ],
)
async def test_its_failure_is_logged_and_costs_nothing(
    caplog: pytest.LogCaptureFixture, command: list[str], reason: str
) -> None:
    await call_on_exit(command, timeout_s=0.3 if command[0] == "sleep" else 30.0)
    (record,) = (r for r in caplog.records if r.msg == "on_exit.failed")
    fields = vars(record)["agent_fields"]
    assert reason in fields["reason"]
    assert fields.get("output", "no such job").strip() == "no such job"


async def test_no_command_is_no_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await call_on_exit([])
    assert caplog.text == ""
