"""The fleet of `scripts/chaos`: a proxy, replicas, and two hosts of which one has the trainer.

Each host has its own network, its own mount of the bucket, and is looked after as by systemd: an
agent that ends without having been told to is started again, unless its exit code says that this
would not help. Replicas' states are on small file systems of their own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from network import PORT, Netns, network

from fakes import fleet
from fakes.fleet import Agent, Site
from fakes.strict_mount import Host as Mount
from fakes.strict_mount import StrictBucket

PROXY: Final = "proxy"
TRAINERS: Final = ("trainer1", "trainer2")
RESTART_S: Final = 1.0  # systemd's pause before it starts a unit again
STATE_MIB: Final = 24
CONFIGURATION: Final = 78
TOKENS_PER_S: Final = 60.0
LOAD_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is asked of the fleet: `rollouts` in flight, `batch` of them for a step."""

    replicas: int
    rollouts: int
    batch: int
    step_s: float = 0.6
    tokens: int = 48


@dataclass(slots=True, kw_only=True)
class Exit:
    """An agent that ended without having been told to."""

    host: str
    code: int
    log: Path


@dataclass(slots=True)
class World:
    """All hosts. Names are those of the schedule, but for the trainer's: it may be on two."""

    site: Site
    shape: Shape
    hosts: dict[str, Netns]
    mounts: dict[str, Mount]
    bucket: StrictBucket
    replicas: list[str]
    agents: dict[str, Agent] = field(default_factory=dict)  # the newest of each host
    exits: list[Exit] = field(default_factory=list)
    trainer_host: str = TRAINERS[0]
    proxy_address: int = 0  # which of its two it has
    join: dict[str, str] = field(default_factory=dict)  # of replicas that have one of their own
    programs: dict[str, Path] = field(default_factory=dict)  # of replicas that were upgraded
    away: set[str] = field(default_factory=set)  # whose agents are not to run
    _due: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.site.folder

    @property
    def until(self) -> Path:
        """TRL ends when it is there."""
        return self.folder / "until"

    @property
    def record(self) -> Path:
        """What TRL tells of its completions and steps."""
        return self.folder / "trl.jsonl"

    def host_of(self, name: str) -> str:
        return self.trainer_host if name == "trainer" else name

    def agent(self, name: str) -> Agent:
        return self.agents[self.host_of(name)]

    # --- starting ----------------------------------------------------------------------------

    def start(self, name: str) -> Agent:
        """The agent of a host, by the host's own name."""
        self._due.pop(name, None)
        within = self.hosts[name].within
        if name == PROXY:
            agent = self._start_proxy(within)
        elif name in TRAINERS:
            agent = self._start_trainer(name, within)
        else:
            agent = self._start_replica(name, within)
        self.agents[name] = agent
        return agent

    def _start_proxy(self, within: Sequence[str]) -> Agent:
        addresses = [f"{one}:{PORT}" for one in self.hosts[PROXY].addresses]
        return self.site.hosts.start(
            PROXY,
            "--role=proxy",
            "--log-json",
            f"--listen={addresses[self.proxy_address]}",
            f"--state-dir={self.folder}/proxy",
            f"--set=proxy.public_addresses={addresses}".replace("'", '"'),
            env=self._env(),
            within=within,
        )

    def _start_trainer(self, name: str, within: Sequence[str]) -> Agent:
        settings = {
            "fake_rollouts": self.shape.rollouts,
            "fake_batch": self.shape.batch,
            "fake_step_s": self.shape.step_s,
            "fake_tokens": self.shape.tokens,
            "fake_until": f'"{self.until}"',
            "fake_record": f'"{self.record}"',
            "save_steps": 5,
        }
        return self.site.hosts.start(
            name,
            "--role=trainer",
            "--log-json",
            "--join=trainer.join",
            f"--state-dir={self.folder}/{name}",
            f"--model={self.folder / 'tiny'}",
            f"--bucket={self.mounts[name].path}",
            f"--engine-python={self.folder / 'chaos-python'}",
            f"--min-replicas={len(self.replicas) // 2}",
            "--set=train.dataset=data.jsonl",
            '--set=train.rewards=["rewards:exact"]',
            "--set=train.max_steps=1000000",
            *(f"--set=train.{key}={value}" for key, value in settings.items()),
            env=self._env(),
            within=within,
        )

    def _start_replica(self, name: str, within: Sequence[str]) -> Agent:
        return self.site.hosts.start(
            name,
            "--role=replica",
            "--log-json",
            f"--join={self.join.get(name, 'replica.join')}",
            f"--name={name}",
            f"--state-dir={self.state_of(name)}",
            f"--model={self.folder / 'tiny'}",
            f"--bucket={self.mounts[name].path}",
            f"--engine-python={self.folder / 'chaos-python'}",
            "--set=engine.module=chaos_engine",
            "--",
            f"--chaos-uds={self.knobs_of(name)}",
            f"--chaos-log={self.loads_of(name)}",
            f"--chaos-tokens-per-s={TOKENS_PER_S}",
            f"--chaos-load-s={LOAD_S}",
            env=self._env() | self._program(name),
            within=within,
        )

    def _env(self) -> dict[str, str]:
        """So that what agents leave behind is found."""
        return {"TMPDIR": str(self.folder / "tmp"), "XDG_RUNTIME_DIR": str(self.folder / "run")}

    def _program(self, name: str) -> dict[str, str]:
        return {"PYTHONPATH": str(self.programs[name])} if name in self.programs else {}

    def state_of(self, name: str) -> Path:
        return self.folder / name

    def knobs_of(self, name: str) -> Path:
        return self.folder / f"{name}.knobs"

    def loads_of(self, name: str) -> Path:
        return self.folder / f"{name}.loads"

    # --- as systemd would --------------------------------------------------------------------

    def keep_away(self, name: str) -> None:
        """Its agent is about to end on purpose, and `start` is called by whoever ended it."""
        self.away.add(name)
        self._due.pop(name, None)

    def come_back(self, name: str) -> None:
        """Waits for what is left of the last agent: two would share one state folder."""
        self.away.discard(name)
        if name in self.agents:
            _reaped(self.agents[name])
        self.start(name)

    def look_after(self) -> None:
        """Start again who ended; remembers those that were not told to."""
        now = time.monotonic()
        for name, agent in list(self.agents.items()):
            code = agent.process.poll()
            if code is None or name in self.away or self.until.exists():
                continue
            if name not in self._due:
                self.exits.append(Exit(host=name, code=code, log=agent.log))
                self._due[name] = now + RESTART_S
            elif now >= self._due[name] and code != CONFIGURATION:
                self.start(name)


def _reaped(agent: Agent) -> None:
    try:
        agent.process.wait(40)
    except subprocess.TimeoutExpired:
        agent.process.kill()
        agent.process.wait()


@contextmanager
def running(folder: Path, shape: Shape) -> Iterator[World]:
    """A fleet whose replicas are ready; its trainer has not been started."""
    replicas = [f"r{number}" for number in range(1, shape.replicas + 1)]
    with ExitStack() as stack:
        hosts = stack.enter_context(network(PROXY, [*TRAINERS, *replicas]))
        addresses = [f"{one}:{PORT}" for one in hosts[PROXY].addresses]
        site = stack.enter_context(fleet.site(folder, addresses[0]))
        _engine_python(folder)
        for name in ("tmp", "run"):
            (folder / name).mkdir()
        bucket = StrictBucket(folder / "s3")
        mounts = {
            name: stack.enter_context(
                bucket.mount(name, read_only=name in replicas, allow_delete=name in TRAINERS)
            )
            for name in [*TRAINERS, *replicas]
        }
        for name in replicas:
            stack.enter_context(_small_disk(folder / name))
        world = World(site, shape, hosts, mounts, bucket, replicas)
        stack.callback(_end, world)
        world.start(PROXY).wait_for("proxy.listening")
        for name in replicas:
            world.start(name)
        for name in replicas:
            world.agents[PROXY].wait_for(rf'"replica": "{name}".*"after": "READY"')
        yield world


def _end(world: World) -> None:
    """Whoever is left; frozen ones and those that wait for the network, too."""
    for name, host in world.hosts.items():
        host.hear()
        if host.relay:
            host.relay.release()
        if name in world.mounts:
            world.mounts[name].release()
        for pid in host.processes():
            subprocess.run(["kill", "-KILL", str(pid)], capture_output=True, check=False)


def _engine_python(folder: Path) -> None:
    """The stand-in of `fakes.fleet`, with this folder's TRL and engine in it."""
    here, text = Path(__file__).parent, (folder / "fake-python").read_text()
    text = text.replace("fakes.trl", "chaos_trl").replace("PYTHONPATH=", f"PYTHONPATH={here}:")
    (folder / "chaos-python").write_text(text)
    (folder / "chaos-python").chmod(0o755)


@contextmanager
def _small_disk(path: Path) -> Iterator[None]:
    path.mkdir(mode=0o700)
    options = f"size={STATE_MIB}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)
