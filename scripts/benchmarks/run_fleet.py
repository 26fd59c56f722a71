"""The fleets of `scripts/bench run`: a proxy, replicas, and a trainer's agent with real TRL."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quorum_fleet import CAPACITY
from quorum_shape import Pace
from run_trl import MAX_TOKENS, MIN_TOKENS, MODEL, TASK, Step, python, settings, step_of
from sync_fleet import LOAD_S, bench_socket, engine_python
from sync_mounts import Mounts, mounted
from sync_trl import Server

from asyncgrpo_agent.store import history
from fakes import fleet
from fakes.fleet import Agent, Site

MAX_LORAS = 16  # both ways' adapters at once
START_S = 180.0
NEVER_REACHED = 1e12  # tokens a second


@dataclass
class Fleet:
    """A proxy and replicas, which stay."""

    site: Site
    mounts: Mounts
    names: list[str]

    def engines(self) -> dict[str, Server]:
        """The benchmark's own way to each, for one trio.run."""
        return {n: Server("http://vllm", str(bench_socket(self.site, n))) for n in self.names}

    @contextmanager
    def training(self, *, batch: int, in_flight: int, sync_steps: int) -> Iterator[Training]:
        """Real TRL below a trainer's agent, from its first step on."""
        agent = self.site.hosts.start(
            "trainer",
            "--role=trainer",
            f"--config={TASK / 'demo.toml'}",
            "--join=trainer.join",
            f"--state-dir={self.site.folder}/trainer",
            f"--bucket={self.mounts.trainer}",
            f"--engine-python={python()}",
            f"--min-replicas={len(self.names)}",
            *settings(batch=batch, in_flight=in_flight, sync_steps=sync_steps),
        )
        try:
            agent.wait_for("phase=training", patience_s=START_S)
            yield Training(agent, self.site.folder / "trainer" / "trainer" / "demo")
        finally:
            if agent.process.poll() is None:
                agent.end(signal.SIGTERM)


@dataclass
class Training:
    """One run of TRL below its agent."""

    agent: Agent
    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    def steps(self) -> list[Step]:
        records = history.read(self.folder / "history.jsonl")
        return [step_of(one, one["t"]) for one in records if one["kind"] == "metrics"]

    def rollouts_failed(self) -> int:
        """Once it has ended."""
        records = history.read(self.folder / "history.jsonl")
        return sum(one["rollouts_failed"] for one in records if one["kind"] == "totals")

    def wait_for_steps(self, number: int, patience_s: float) -> list[Step]:
        deadline = time.monotonic() + patience_s
        while len(steps := self.steps()) < number:
            if self.agent.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"TRL came no further than step {len(steps)}:\n{self._log()}")
            time.sleep(0.2)
        return steps

    def _log(self) -> str:
        return self.agent.text()[-4000:] + (self.folder / "train.log").read_text()[-4000:]


@contextmanager
def running(kind: str, pace: Pace, scratch: Path | None, *, shared: bool = True) -> Iterator[Fleet]:
    """`shared`: completions slow each other down, as in a real engine; otherwise none does."""
    names = [f"r{number}" for number in range(1, pace.replicas + 1)]
    with (
        tempfile.TemporaryDirectory(prefix="bench-run-", dir=scratch) as folder,
        fleet.site(Path(folder)) as site,
        mounted(kind, Path(folder), names) as mounts,
    ):
        made = Fleet(site, mounts, names)
        engine = engine_python(Path(folder))
        agents = [site.proxy(), *(_replica(made, name, pace, engine, shared) for name in names)]
        try:
            yield made
        finally:
            for agent in reversed(agents):
                if agent.process.poll() is None:
                    agent.end()


def _replica(made: Fleet, name: str, pace: Pace, engine: Path, shared: bool) -> Agent:
    alone, most = pace.tokens_per_s, pace.most_tokens_per_s
    if not shared:
        alone, most = pace.together_per_s, NEVER_REACHED
    return made.site.replica(
        name,
        f"--model={MODEL}",
        "--set=engine.module=run_engine",
        f"--set=engine.max_loras={MAX_LORAS}",
        f"--set=replica.capacity={CAPACITY}",
        f"--engine-python={engine}",
        "--",
        f"--bench-uds={bench_socket(made.site, name)}",
        f"--bench-tokens-per-s={alone}",
        f"--bench-most-tokens-per-s={most}",
        f"--bench-min-share={MIN_TOKENS / MAX_TOKENS}",
        f"--bench-load-s={LOAD_S}",
        bucket=[f"--bucket={made.mounts.replicas[name]}"],
    )


async def seen(engine: Server) -> dict[str, float]:
    """What an engine has done by now."""
    found: dict[str, float] = json.loads(await engine.must("GET", "/bench"))
    return found
