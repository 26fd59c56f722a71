"""Whole agents as processes, with fake engines: what a user starts, without vLLM and TRL.

`engine_python` makes an executable that stands in for the engine's Python: it runs FakeVllm for
`-m fakes.vllm` and FakeTrl for `-m asyncgrpo_engine.train`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess  # noqa: TID251 - agents run here as a user starts them
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.adapters import safetensors

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 40.0


def engine_python(folder: Path, hub_python: str = "") -> Path:
    """A stand-in for the engine's Python. Models of a hub are loaded by `hub_python`, a real
    one."""
    path = folder / "fake-python"
    hub = f'case "$2" in asyncgrpo_engine.download) exec {hub_python} "$@" ;; esac\n'
    path.write_text(
        "#!/bin/sh\n"
        + (hub if hub_python else "")
        + 'case "$2" in asyncgrpo_engine.train) shift 2; set -- -m fakes.trl "$@" ;; esac\n'
        f'exec env PYTHONPATH={ROOT}/agent:{ROOT}/tests {sys.executable} -P "$@"\n'
    )
    path.chmod(0o755)
    return path


def model_folder(folder: Path) -> Path:
    """A model as far as the agent looks into it."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "model.safetensors").write_bytes(safetensors({"w": ([4, 4], bytes(range(64)))}))
    return model


def write_task(folder: Path) -> Path:
    """Data and a reward module that FakeTrl never reads, but the agent checks for."""
    (folder / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    return folder / "data.jsonl"


@dataclass
class Agent:
    """One agent process; its output is in `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, *, patience_s: float = PATIENCE_S) -> re.Match[str]:
        """Until its log shows `pattern`; the process ending first is a failure."""
        deadline = time.monotonic() + patience_s
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.text())
            if found:
                return found
            if ended or time.monotonic() > deadline:
                state = f"ended with {self.process.returncode}" if ended else "runs"
                raise AssertionError(f"{self.name} ({state}): no {pattern!r} in\n{self.text()}")
            time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock

    def end(self, number: int = signal.SIGTERM, *, patience_s: float = PATIENCE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(patience_s)


@dataclass
class Hosts:
    """Starts agents and ends what is left of them."""

    folder: Path
    program: Sequence[str] = (sys.executable, "-m", "asyncgrpo_agent")
    agents: list[Agent] = field(default_factory=list)

    def start(
        self,
        name: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> Agent:
        """`within` is a command that becomes the agent, such as `ip netns exec NAME`."""
        return self.run(name, [*within, *self.program, *arguments], env)

    def run(self, name: str, command: list[str], env: dict[str, str] | None = None) -> Agent:
        """Any program of a host; the agents' own is `start`'s."""
        number = sum(agent.name == name for agent in self.agents)
        log = self.folder / f"{name}-{number}.out"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "agent"), **(env or {})},
                cwd=self.folder,
            )
        agent = Agent(name, process, log)
        self.agents.append(agent)
        return agent

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.program, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
            cwd=self.folder,
            check=True,
        )
        return done.stdout


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    started = Hosts(folder)
    try:
        yield started
    finally:
        for agent in started.agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()


def processes_naming(text: str) -> list[str]:
    """Command lines of living processes that contain `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in line and int(entry.name) != os.getpid():
                found.append(line)
    return found


def wait_until_none(text: str, patience_s: float = 15.0) -> None:
    deadline = time.monotonic() + patience_s
    while left := processes_naming(text):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock


def end_guards(text: str, patience_s: float = 20.0) -> None:
    """Wait until nobody but guards is left of those that were killed; they would wait for longer.

    Each is the shell of `procs.child` that outlives a killed agent and gives its group some grace.
    """
    deadline = time.monotonic() + patience_s
    while left := [line for line in processes_naming(text) if "asyncgrpo-launcher" not in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if b"asyncgrpo-launcher" in line and text.encode() in line:
                    os.kill(int(entry.name), signal.SIGKILL)


def counts(output_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output_dir / "counts.json").read_text())
    return found


@dataclass
class Site:
    """One run on one proxy."""

    hosts: Hosts
    address: str
    bucket: Sequence[str] = ()
    """Flags that say where the bucket is; without any, it is one folder for all."""
    model: Sequence[str] | None = None
    """Flags that say what the model is; None: a folder."""

    @property
    def folder(self) -> Path:
        return self.hosts.folder

    def join_file(self, role: str, name: str, *more: str) -> None:
        """Make a join line in the file `name`."""
        self.hosts.command(
            *("token", "create", f"--role={role}", "--run=demo", f"--output={name}"),
            *(f"--state-dir={self.folder}/proxy", f"--address={self.address}", *more),
        )

    def proxy(self, *more: str, within: Sequence[str] = ()) -> Agent:
        agent = self.hosts.start(
            "proxy",
            "--role=proxy",
            f"--listen={self.address}",
            f"--state-dir={self.folder}/proxy",
            *more,
            within=within,
        )
        agent.wait_for("proxy.listening")
        return agent

    def replica(
        self,
        name: str,
        *more: str,
        bucket: Sequence[str] = (),
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> Agent:
        return self.hosts.start(
            name,
            "--role=replica",
            "--join=replica.join",
            f"--name={name}",
            f"--state-dir={self.folder}/{name}",
            *self._common(bucket),
            "--set=engine.module=fakes.vllm",
            *more,
            env=env,
            within=within,
        )

    def trainer(
        self,
        steps: int,
        *more: str,
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> Agent:
        return self.hosts.start(
            "trainer",
            "--role=trainer",
            "--join=trainer.join",
            f"--state-dir={self.folder}/trainer",
            *self._common(),
            "--set=train.dataset=data.jsonl",
            '--set=train.rewards=["rewards:exact"]',
            f"--set=train.max_steps={steps}",
            *more,
            env=env,
            within=within,
        )

    def _common(self, bucket: Sequence[str] = ()) -> list[str]:
        return [
            *([f"--model={self.folder / 'tiny'}"] if self.model is None else self.model),
            *(bucket or self.bucket or [f"--bucket={self.folder / 'bucket'}"]),
            f"--engine-python={self.folder / 'fake-python'}",
        ]

    def counts(self) -> dict[str, int]:
        return counts(self.folder / "trainer" / "output" / "demo")


@contextmanager
def site(folder: Path, address: str = "") -> Iterator[Site]:
    """A run "demo" with join files for its replicas and its trainer; nothing is started yet."""
    engine_python(folder)
    model_folder(folder)
    write_task(folder)
    (folder / "bucket").mkdir()
    with hosts(folder) as started:
        made = Site(started, address or free_address())
        started.command("run", "create", "demo", f"--state-dir={folder}/proxy")
        for role in ("replica", "trainer"):
            made.join_file(role, f"{role}.join")
        yield made
    end_guards(str(folder))
    wait_until_none(str(folder))


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
