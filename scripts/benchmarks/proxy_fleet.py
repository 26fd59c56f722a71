"""The fleet of `scripts/bench proxy`: a proxy, a trainer and replicas, all in processes.

The trainer's agent has a child that only waits: what TRL would do is done by the benchmark, through
the same gateway. Each engine has a port for the baseline and for its counters.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import fleet
from fakes.adapters import write_adapter
from fakes.fleet import ROOT, Agent, Site, free_address

HERE = Path(__file__).resolve().parent
CAPACITY = 4_000  # no replica is ever full
REQUEST_TIMEOUT_S = 600
PATIENCE_S = 60.0
TICK_S = 0.1
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(kw_only=True)
class Fleet:
    """All that runs, and the policy's name that all replicas serve now."""

    site: Site
    python: Path
    proxy: Agent
    trainer: Agent = field(init=False)
    gateway: str = ""
    model: str = ""
    ports: dict[str, int] = field(default_factory=dict)  # of engines, by replica

    def start_trainer(self) -> None:
        self.trainer = self.site.trainer(
            1,
            "--min-replicas=1",
            f"--engine-python={self.python}",
            "--set=trainer.quorum=1.0",
            f"--set=trainer.request_timeout_s={REQUEST_TIMEOUT_S}",
        )
        self.trainer.wait_for("replicas.ready")
        job = self.site.folder / "trainer" / "trainer" / "demo" / "job.json"
        self.gateway = json.loads(job.read_text())["gateway"]

    def grow(self, replicas: int) -> None:
        """Until so many run."""
        for number in range(len(self.ports) + 1, replicas + 1):
            name, port = f"r{number}", int(free_address().rpartition(":")[2])
            self.site.replica(
                name,
                "--set=engine.module=proxy_engine",
                f"--set=replica.capacity={CAPACITY}",
                f"--engine-python={self.python}",
                "--",
                f"--bench-port={port}",
            )
            self.ports[name] = port

    def publish(self) -> None:
        """A policy that every replica serves when this returns."""
        self._await_ready()
        version = int(self.model.rpartition("v")[2]) + 1 if self.model else 0
        self.model = f"trl-policy-v{version}"
        folder = write_adapter(self.site.folder / self.model, seed=version)
        load = {"lora_name": self.model, "lora_path": str(folder)}
        call(f"{self.gateway}/v1/load_lora_adapter", load)

    def counters(self) -> list[dict[str, float]]:
        """Of each engine."""
        return [call(f"http://127.0.0.1:{port}/bench") for port in self.ports.values()]

    def engine_urls(self) -> list[str]:
        """Of the engines themselves, for a load that nothing is to be between."""
        return [f"http://127.0.0.1:{port}" for port in self.ports.values()]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while call(f"{self.gateway}/health")["ready"] < len(self.ports):
            if time.monotonic() > deadline:
                raise SystemExit(f"not all of {len(self.ports)} replicas became ready")
            time.sleep(TICK_S)


@contextmanager
def running(replicas: int) -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-proxy-") as folder,
        fleet.site(Path(folder)) as site,
    ):
        made = Fleet(site=site, python=_engine_python(Path(folder)), proxy=site.proxy())
        try:
            made.grow(replicas)
            made.start_trainer()
            made.publish()
            yield made
        finally:
            for agent in reversed(site.hosts.agents):
                if agent.process.poll() is None:
                    agent.end()


def _engine_python(folder: Path) -> Path:
    """Waits instead of training, and runs all else in this Python."""
    path = folder / "bench-python"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in *asyncgrpo_engine.train*--check*) exit 0 ;;\n'
        "*asyncgrpo_engine.train*) exec sleep 1000000 ;; esac\n"
        f'exec env PYTHONPATH={ROOT}/agent:{ROOT}/tests:{HERE} {sys.executable} -P "$@"\n'
    )
    path.chmod(0o755)
    return path


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    with LOCAL.open(request, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text[:1] == b"{" else text.decode()


# --- what the kernel knows of a process ------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Of all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """What it has resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
