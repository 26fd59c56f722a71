"""A fleet that does what a script says, for those who look on: real links to a real proxy.

Run as a program it is given a file of joins and scripts; all trainers and replicas of all runs are
tasks of this one process. They dial again when the proxy was away. There is no engine and no
adapter: messages say that there are.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import msgspec
import trio

from asyncgrpo_agent.core.adapters import commit_key
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ROLLOUT_ANSWER, ControlChannel, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.tokens import ALL_RUNS
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import ROLLOUTS, STRANGERS
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, ROLLOUT_REQUEST
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.fleet import ROOT, Agent, Hosts, free_address, hosts
from fakes.scripted_past import (
    SIZE_BYTES,
    Script,
    adapter_of,
    digest_of,
    metrics_of,
    names_of,
    past_of,
    trainer_phases,
)
from fakes.scripted_replicas import Control, ScriptedReplica, keep_dialling

PIECE_RECORDS = 120  # of a history, in one message
LIVE_VERSIONS = 3
GROUP = 8
BURST = 64
UNIX_S = time.time  # noqa: TID251 - agents of a real proxy


class Part(msgspec.Struct, frozen=True):
    """One run of the file that the program is given."""

    script: Script
    trainer: str  # join lines
    replica: str


@dataclass
class ScriptedTrainer:
    script: Script
    join: Join
    rng: Random
    attempt: str = ""
    step: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0  # rollouts
    served: str = ""  # the adapter that rollouts name
    published: m.Published | None = None
    grown: trio.Event = field(default_factory=trio.Event)
    synced: trio.Event = field(default_factory=trio.Event)
    suspect: set[str] = field(default_factory=set)

    async def run(self) -> None:
        await keep_dialling(self.join, m.ALPN_FORWARD, self._serve, self.rng)

    def record(self, kind: str, **fields: object) -> None:
        self.records.append({"t": UNIX_S(), "kind": kind, **fields})
        self.grown.set()
        self.grown = trio.Event()

    async def _serve(self, link: Link) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(link.run, _takes_no_streams)
            control: Control = ControlChannel(
                await link.open(CONTROL_REQUEST, STRANGERS), FROM_ACCEPTOR
            )
            accepted = await self._register(control)
            link.authenticated(AUTHENTICATED, accepted.ping_s, accepted.ping_deadline_s)
            known = (accepted.facts or {}).get(self.script.run, 0)
            nursery.start_soon(self._tell, control, known)
            nursery.start_soon(self._listen, control)
            if self.script.finished:
                await trio.sleep(1.0)
                await control.send(m.RunEnded(True, self.script.finished))
                await trio.sleep_forever()
            if self.published is not None:
                await control.send(self.published)
            elif self.script.replicas:
                await self._publish(control)
            if self.script.rollouts:
                nursery.start_soon(self._find_faulty, link)
            for number in range(self.script.rollouts):
                nursery.start_soon(self._roll_out, link, number)
            await self._train(control)

    async def _register(self, control: Control) -> m.Accepted:
        hello = m.Hello(
            protocol=m.PROTOCOL,
            role="trainer",
            run=self.script.run,
            name="trainer",
            instance=f"{self.script.run}-trainer",
            agent_version="0.1.0",
            token=self.join.token,
            attempt=self.attempt,
            max_staleness=4,
            base_model=self.script.model,
            model_digest="d1",
            allow_quantized=True,
        )
        await control.send(hello)
        accepted = await control.receive()
        assert isinstance(accepted, m.Accepted), accepted
        if not self.attempt:
            self.attempt, self.step = accepted.attempt, self.script.past_steps
            self.records = past_of(self.script, self.attempt, UNIX_S())
        return accepted

    async def _tell(self, control: Control, known: int) -> None:
        """The history from `known` on, and what comes to it."""
        past = len(self.records)
        while True:
            while known < len(self.records):
                piece = self.records[known : known + PIECE_RECORDS]
                end = known + len(piece)
                await control.send(m.Facts(self.script.run, known, end, piece, end <= past))
                known = end
            await self.grown.wait()

    async def _listen(self, control: Control) -> None:
        while True:
            match await control.receive():
                case m.ReplicaAck(replica=name, ack=ack, since_announced_s=seconds):
                    fields = {"adapter": ack.adapter.name, "ok": ack.ok, "reason": ack.reason}
                    self.record(
                        "ack", replica=name, phases_s=ack.phases_s, seconds=seconds, **fields
                    )
                case m.Fleet(replicas=rows):
                    self.suspect = {row.name for row in rows if row.state == "SUSPECT"}
                case m.SyncReport(adapter=adapter) as report:
                    self._note_sync(adapter, report)

    def _note_sync(self, adapter: m.Adapter, report: m.SyncReport) -> None:
        phases_s = trainer_phases(self.script, adapter.version)
        self.record(
            "sync",
            adapter=adapter.name,
            version=adapter.version,
            bytes=SIZE_BYTES,
            phases_s=phases_s,
            seconds=sum(phases_s.values()) + report.elapsed_s,
            report={"timed_out": report.timed_out, "elapsed_s": report.elapsed_s},
        )
        self.served = adapter.name
        self.synced.set()
        self.synced = trio.Event()

    async def _publish(self, control: Control) -> None:
        version = self.step
        name = adapter_of(self.script, self.attempt, version)
        adapter = m.Adapter(name, self.attempt, version, digest_of(self.script, version))
        oldest = max(0, version - LIVE_VERSIONS + 1)
        live = [adapter_of(self.script, self.attempt, v) for v in range(oldest, version + 1)]
        key = commit_key(self.attempt, version)
        phases_s = trainer_phases(self.script, version)
        self.published = m.Published(adapter, key, live, 0.8, 20.0, SIZE_BYTES, phases_s)
        await control.send(self.published)
        await control.send(m.Retired([], live))

    async def _train(self, control: Control) -> None:
        deadline = trio.current_time()
        while self.step < self.script.max_steps:
            deadline = max(deadline + self.script.step_s, trio.current_time())
            await trio.sleep_until(deadline)
            self.step += 1
            values, most = metrics_of(self.script, self.step), self.script.max_steps
            self.record("metrics", step=self.step, max_steps=most, values=values)
            if self.script.live_syncs and self.script.replicas:
                await self._publish(control)
        await trio.sleep_forever()

    async def _find_faulty(self, link: Link) -> None:
        """Ask for much at once, of prompts that nobody has seen, until who fails is suspect."""
        for burst in itertools.count():
            if self.suspect >= set(self.script.fails):
                return
            while not self.served:
                await self.synced.wait()
            async with trio.open_nursery() as nursery:
                for number in range(BURST):
                    name = f"burst-{burst}-{number}"
                    nursery.start_soon(self._ask, link, name, f"{self.script.run} {name}")

    async def _roll_out(self, link: Link, number: int) -> None:
        """One rollout after the other, in groups of equal prompts."""
        for turn in itertools.count():
            while not self.served:
                await self.synced.wait()
            self.sent += 1
            await self._ask(link, f"{number}-{turn}", f"{self.script.run} {self.sent // GROUP}")

    async def _ask(self, link: Link, name: str, prompt: str) -> None:
        blocks = [crc32(prompt.encode()), crc32(f"{prompt}b".encode())]
        tokens = 100 + self.rng.randrange(400)
        envelope = m.Rollout(name, "/v1/completions", self.served, blocks, tokens, 512, 60.0)
        async with await link.open(ROLLOUT_REQUEST, ROLLOUTS) as stream:
            await stream.send(framing.encode(envelope) + b"{}")
            await stream.end()
            await stream.response()
            await read_envelope(stream, ROLLOUT_ANSWER)
            while await stream.receive():
                pass


async def _takes_no_streams(stream: LinkStream) -> None:
    raise LinkError("a proxy opens no stream here")


def parts(state_dir: Path, address: str, scripts: Iterable[Script]) -> list[Part]:
    """The runs, made known to the proxy with this state folder, and joins for them."""
    made = []
    for script in scripts:
        identity.create_run(state_dir, script.run)
        lines = [
            identity.create_join(
                state_dir,
                role=role,
                run=script.run,
                addresses=[address],
                now_unix_s=UNIX_S(),
            )
            for role in ("trainer", "replica")
        ]
        made.append(Part(script, *lines))
    return made


@dataclass(frozen=True, kw_only=True)
class ScriptedSite:
    """A proxy and a scripted fleet, each a process."""

    hosts: Hosts
    address: str
    fleet: Agent

    @property
    def state_dir(self) -> Path:
        return self.hosts.folder / "proxy"

    def proxy(self) -> Agent:
        """Start it, also again after it has ended."""
        agent = self.hosts.start(
            "proxy", "--role=proxy", f"--listen={self.address}", f"--state-dir={self.state_dir}"
        )
        agent.wait_for("proxy.listening")
        return agent

    def viewer(self, run: str = ALL_RUNS, *, rollouts: bool = False) -> str:
        """A join line."""
        return identity.create_join(
            self.state_dir,
            role="viewer",
            run=run,
            addresses=[self.address],
            now_unix_s=UNIX_S(),
            rollouts=rollouts,
        )


@contextmanager
def scripted_site(folder: Path, scripts: Iterable[Script]) -> Iterator[ScriptedSite]:
    """All agents dial; the proxy is yet to be started."""
    address, script_file = free_address(), folder / "fleet.json"
    made = parts(folder / "proxy", address, scripts)
    script_file.write_bytes(msgspec.json.encode(made))
    command = [sys.executable, "-m", "fakes.scripted_fleet", str(script_file)]
    with hosts(folder) as started:
        env = {"PYTHONPATH": f"{ROOT}/agent:{ROOT}/tests"}
        yield ScriptedSite(hosts=started, address=address, fleet=started.run("fleet", command, env))


async def play(made: Iterable[Part]) -> None:
    """Until it is cancelled."""
    async with trio.open_nursery() as nursery:
        for part in made:
            rng = Random(part.script.run)
            nursery.start_soon(ScriptedTrainer(part.script, decode(part.trainer), rng).run)
            join = decode(part.replica)
            for name in names_of(part.script):
                replica = ScriptedReplica(part.script, name, join, UNIX_S, Random(name))
                nursery.start_soon(replica.run)


if __name__ == "__main__":
    trio.run(play, msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Part]))
