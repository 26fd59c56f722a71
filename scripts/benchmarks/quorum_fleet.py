"""The fleet of `scripts/bench quorum`: a proxy and replicas that stay, trainers' agents that come
and go. Each trainer's agent is a new attempt of the same run, with a quorum of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from quorum_shape import Shape
from sync_fleet import LOAD_S, bench_socket, engine_python
from sync_mounts import Mounts, mounted
from sync_trl import MAX_LORAS, Server

from fakes import fleet
from fakes.fleet import Agent, Site

CAPACITY = 256  # rollouts that a replica takes at once: vLLM's own `max_num_seqs`
QUIET_S = 30.0
TICK_S = 0.02


@dataclass
class Fleet:
    """What stays."""

    site: Site
    mounts: Mounts
    names: list[str]
    python: Path

    def engines(self) -> dict[str, Server]:
        """The benchmark's own way to each, for one trio.run."""
        return {n: Server("http://vllm", str(bench_socket(self.site, n))) for n in self.names}

    @contextmanager
    def trainer(self, quorum: float) -> Iterator[str]:
        """The gateway of a trainer's agent."""
        agent = self.site.trainer(
            1,
            f"--min-replicas={len(self.names)}",
            f"--engine-python={self.python}",
            f"--set=trainer.quorum={quorum}",
        )
        try:
            agent.wait_for("replicas.ready")
            job = self.site.folder / "trainer" / "trainer" / "demo" / "job.json"
            yield json.loads(job.read_text())["gateway"]
        finally:
            agent.end()


@contextmanager
def running(kind: str, shape: Shape, scratch: Path | None) -> Iterator[Fleet]:
    names = [f"r{number}" for number in range(1, shape.replicas + 1)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-quorum-", dir=scratch) as folder,
        fleet.site(Path(folder)) as site,
        mounted(kind, Path(folder), names) as mounts,
    ):
        site.bucket = [f"--bucket={mounts.trainer}"]
        made = Fleet(site, mounts, names, engine_python(Path(folder)))
        agents = [site.proxy(), *(_replica(made, name, shape) for name in names)]
        try:
            yield made
        finally:
            for agent in reversed(agents):
                if agent.process.poll() is None:
                    agent.end()


def _replica(made: Fleet, name: str, shape: Shape) -> Agent:
    return made.site.replica(
        name,
        "--set=engine.module=shared_engine",
        f"--set=engine.max_loras={MAX_LORAS}",
        f"--set=replica.capacity={CAPACITY}",
        f"--engine-python={made.python}",
        "--",
        f"--bench-uds={bench_socket(made.site, name)}",
        f"--bench-tokens-per-s={shape.tokens_per_s}",
        f"--bench-most-tokens-per-s={shape.most_tokens_per_s}",
        f"--bench-load-s={LOAD_S}",
        bucket=[f"--bucket={made.mounts.replicas[name]}"],
    )


# --- what the benchmark asks of engines ------------------------------------------------------


async def load_takes(engine: Server, seconds: float) -> None:
    await engine.must("POST", "/bench", {"load_s": seconds})


async def seen(engines: dict[str, Server]) -> dict[str, float]:
    """Sums of all engines: tokens, and seconds of their clocks, paused, without a completion."""
    rows = [await _row(engine) for engine in engines.values()]
    return {name: sum(row[name] for row in rows) for name in rows[0]}


async def quiet(engines: dict[str, Server]) -> None:
    """Until no engine has anything to do."""
    with trio.fail_after(QUIET_S):
        while True:
            if not (await seen(engines))["running"]:
                return
            await trio.sleep(TICK_S)


async def _row(engine: Server) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(await engine.must("GET", "/bench"))
    return row
