"""Role local with fake engines: three kinds of agent, a run to its end, and every way to stop."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import fleet

pytestmark = pytest.mark.slow


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[fleet.Hosts]:
    fleet.engine_python(tmp_path)
    fleet.model_folder(tmp_path)
    fleet.write_task(tmp_path)
    with fleet.hosts(tmp_path) as started:
        yield started
    fleet.wait_until_none(str(tmp_path))


def local(machine: fleet.Hosts, *more: str) -> fleet.Agent:
    return machine.start(
        "local",
        "--role=local",
        f"--state-dir={machine.folder / 'state'}",
        "--run=demo",
        f"--model={machine.folder / 'tiny'}",
        f"--engine-python={machine.folder / 'fake-python'}",
        "--set=engine.module=fakes.vllm",
        "--set=train.dataset=data.jsonl",
        '--set=train.rewards=["rewards:exact"]',
        "--set=train.max_steps=6",
        *more,
    )


def test_a_run_to_its_end(machine: fleet.Hosts) -> None:
    # At a rate by the clock, or the replica that a busy machine measures as faster may take all.
    agent = local(machine, '--set=engine.args=["--fake-tokens-per-s=60"]')
    assert agent.process.wait(90) == 0, agent.text()
    counts = fleet.counts(machine.folder / "state" / "trainer" / "output" / "demo")
    assert counts == {"rollouts": 48, "failed": 0, "wrong_bytes": 0, "steps": 6}
    history = (machine.folder / "state/trainer/trainer/demo/history.jsonl").read_text()
    records = [json.loads(line) for line in history.splitlines()]
    totals = next(r for r in records if r["kind"] == "totals")
    assert totals["rollouts"] == 48
    assert totals["rollouts_failed"] == 0
    assert len(totals["replicas"]) == 2
    assert all(row["requests"] > 0 for row in totals["replicas"]), totals
    assert "WARNING" not in "".join(
        log.read_text() for log in (machine.folder / "state" / "logs").glob("*.log")
    )


def test_a_drained_replica_leaves_the_rest_to_the_run(machine: fleet.Hosts) -> None:
    agent = local(machine, "--set=train.max_steps=30", "--set=train.fake_step_s=1")
    logs = machine.folder / "state/logs"
    agent.wait_for("child.started child=trainer")
    wait_for_text(logs / "proxy.log", "replica=replica-1 before=JOINING after=READY")
    wait_for_text(logs / "trainer.log", "adapter.published")
    machine.command("drain", "replica-1", f"--state-dir={machine.folder}/state/proxy", "--wait")
    agent.wait_for("local.replica_left child=replica-1")
    assert agent.process.wait(60) == 0, agent.text()
    counts = fleet.counts(machine.folder / "state" / "trainer" / "output" / "demo")
    assert (counts["failed"], counts["steps"]) == (0, 30)


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + fleet.PATIENCE_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {path}"
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock


def token_rows(machine: fleet.Hosts) -> list[dict[str, object]]:
    state = machine.folder / "state/proxy"
    rows: list[dict[str, object]] = json.loads(
        machine.command("token", "list", "--json", f"--state-dir={state}")
    )
    return rows


def test_the_same_run_again_is_a_new_attempt(machine: fleet.Hosts) -> None:
    for number in (1, 2):
        agent = local(machine, "--set=train.max_steps=2")
        assert agent.process.wait(90) == 0, agent.text()
        assert [row["ended"] for row in token_rows(machine)] == ["the token was revoked"] * 2
        proxy_log = (machine.folder / "state/logs/proxy.log").read_text()
        assert f"attempt=a{number:04d}-" in proxy_log


def await_checking(agent: fleet.Agent, machine: fleet.Hosts) -> None:
    agent.wait_for("child.started child=trainer")
    history = machine.folder / "state/trainer/trainer/demo/history.jsonl"
    while not history.exists():
        assert agent.process.poll() is None, agent.text()
        time.sleep(0.01)  # noqa: TID251 - another process has no virtual clock
    fleet.Agent("history", agent.process, history).wait_for(r'"phase": ?"checking"')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["local", "checking", "training"])
def test_a_signal_at_any_moment_leaves_nothing(
    machine: fleet.Hosts, number: signal.Signals, moment: str
) -> None:
    agent = local(machine, "--set=train.max_steps=100000")
    if moment == "checking":  # the view, which looks each second, may miss it
        await_checking(agent, machine)
    else:
        agent.wait_for({"local": "child.started child=proxy"}.get(moment, rf"(?m)^{moment} "))
    assert agent.end(number) in (0, 130), agent.text()
    fleet.wait_until_none(str(machine.folder))
    again = local(machine, "--set=train.max_steps=1")
    assert again.process.wait(90) == 0, again.text()


def test_killed_without_a_chance_to_clean_up(machine: fleet.Hosts) -> None:
    agent = local(machine, "--set=train.max_steps=100000")
    agent.wait_for(r"(?m)^training .*replica-2: READY")
    second = local(machine)
    assert second.process.wait(20) == 78
    assert f"{machine.folder}/state: another local fleet runs in this folder" in second.text()
    agent.end(signal.SIGKILL)
    fleet.wait_until_none(str(machine.folder), patience_s=30)
    left = token_rows(machine)
    assert [row["ended"] for row in left] == ["", ""]
    again = local(machine, "--set=train.max_steps=1")
    assert again.process.wait(90) == 0, again.text()
    rows = token_rows(machine)
    assert [row["ended"] for row in rows] == ["the token was revoked"] * 2
    assert {row["id"] for row in rows}.isdisjoint(row["id"] for row in left)


def test_the_engine_cannot_start(machine: fleet.Hosts) -> None:
    agent = local(machine, "--set=engine.module=fakes.no_such_module")
    assert agent.process.wait(60) == 1
    assert "vLLM ended with exit code 1" in agent.text()
    assert "No module named fakes.no_such_module" in agent.text()


def test_the_job_is_refused(machine: fleet.Hosts) -> None:
    agent = local(machine, "--set=train.fake_refusal=unknown chat template")
    assert agent.process.wait(60) == 78
    assert "train.fake_refusal: unknown chat template. leave it out" in agent.text()


def test_training_fails(machine: fleet.Hosts) -> None:
    agent = local(machine, "--set=train.fake_exit=3")
    assert agent.process.wait(90) == 1
    assert "the engine-side child train ended with exit code 3" in agent.text()


def test_a_model_that_is_none(machine: fleet.Hosts) -> None:
    (machine.folder / "tiny" / "config.json").unlink()
    agent = local(machine)
    assert agent.process.wait(20) == 78
    assert "config.json" in agent.text()


def test_a_bucket_that_is_not_there(machine: fleet.Hosts) -> None:
    agent = local(machine, "--bucket=/no/such/bucket")
    assert agent.process.wait(20) == 78
    assert "/no/such/bucket" in agent.text()


def test_a_port_that_is_taken(machine: fleet.Hosts) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        agent = local(machine, f"--set=trainer.gateway=127.0.0.1:{port}")
        assert agent.process.wait(30) == 78
    assert f"trainer.gateway 127.0.0.1:{port}: cannot listen" in agent.text()
