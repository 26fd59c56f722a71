"""A run at a proxy whose replicas are servers behind FakeEdges; rollouts come over a real link."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from asyncgrpo_agent.config.sections import Config, Proxy
from asyncgrpo_agent.config.upstreams import Upstream
from asyncgrpo_agent.core.replicas import State
from asyncgrpo_agent.net.control import ROLLOUT_ANSWER, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.proxy_rollouts import serve_rollout
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink, Runs
from asyncgrpo_agent.roles.proxy_upstream import Seat, take_seats
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import ROLLOUT_REQUEST
from fakes.bucket import ATTEMPT, FakeTrainer
from fakes.edge import TOKEN, FakeEdge, server_context, write_certificate
from fakes.links import linked_pair
from fakes.vllm import FakeVllm

BASE = "base"
RUN = "demo"


@dataclass
class Platform:
    """Where servers are exposed: a bucket folder that all of them see, and one CA."""

    nursery: trio.Nursery
    folder: Path
    run: ProxyRun = field(default_factory=lambda: ProxyRun(RUN, attempt=ATTEMPT))
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)  # of edges, by name
    link: Link | None = None

    def __post_init__(self) -> None:
        chain, key, self.ca_file = write_certificate(self.folder)
        self.context: ssl.SSLContext = server_context(chain, key)
        self.token_file = self.folder / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.bucket = self.folder / "bucket"
        self.trainer = FakeTrainer(self.folder / "local", self.bucket / RUN)
        (self.bucket / RUN).mkdir(parents=True)

    async def expose(self, name: str, **knobs: Any) -> FakeEdge:
        """A server behind an edge of its own."""
        edge = FakeEdge(FakeVllm(model=BASE, max_loras=6), **knobs)
        await self.start(name, edge)
        return edge

    async def start(self, name: str, edge: FakeEdge) -> None:
        self.scopes[name] = trio.CancelScope()

        async def serve(*, task_status: trio.TaskStatus[object]) -> None:
            with self.scopes[name]:
                await edge.run(self.context, task_status=task_status)

        await self.nursery.start(serve)

    def add(self, name: str, edge: FakeEdge, **keys: Any) -> Seat:
        """Have the proxy use it."""
        usual: dict[str, Any] = {
            "name": name,
            "url": edge.url,
            "run": RUN,
            "token_file": str(self.token_file),
            "ca_file": str(self.ca_file),
            "bucket_path": str(self.bucket),
            "allow_unverified": True,
        }
        config = Config(role="proxy", proxy=Proxy(upstream=[Upstream(**{**usual, **keys})]))
        runs = Runs()
        runs[RUN] = self.run
        (seat,) = take_seats(config, runs, {"UPSTREAM_TOKEN": TOKEN})
        self.nursery.start_soon(seat.serve)
        return seat

    async def join(self, name: str, edge: FakeEdge, **keys: Any) -> Seat:
        """The same, until it is READY."""
        seat = self.add(name, edge, **keys)
        await self.until(lambda: seat.here.replica.state is State.READY)
        return seat

    async def until(self, condition: Any, patience_s: float = 120.0) -> None:
        with trio.fail_after(patience_s):
            while not condition():
                await self.run.changed(trio.current_time() + 0.25)

    async def publish(self, version: int, *, visible: bool = True, **options: Any) -> str:
        """An adapter of the trainer; gives its physical name. Hidden ones are shown by `show`."""
        written = self.trainer.publish(version, **options)
        name = written.adapter.name
        if not visible:
            folder = self.bucket / RUN / written.folder
            folder.rename(folder.with_name("hidden"))
        adapter = m.Adapter(name, ATTEMPT, version, written.adapter.digest)
        live = [*self.run.live, name]
        await self.run.publish(
            m.Published(adapter, written.commit_key, live, 0.5, 30, 1, {}, written.folder)
        )
        return name

    def show(self, version: int) -> None:
        folder = self.bucket / RUN / "adapters" / ATTEMPT
        (folder / "hidden").rename(folder / f"v{version:06d}")

    async def serving(self, name: str, *seats: Seat) -> None:
        await self.until(lambda: all(name in seat.here.replica.loaded for seat in seats))

    async def ask(
        self, model: str, *, max_tokens: int = 4, deadline_s: float = 600.0, seed: int = 1
    ) -> tuple[m.RolloutAnswer, bytes]:
        """One rollout of the trainer's gateway."""
        if self.link is None:

            async def at_proxy(stream: LinkStream) -> None:
                await serve_rollout(self.run, stream, 100)

            self.link, _ = await linked_pair(self.nursery, at_proxy)
        request = {"model": model, "prompt": [seed, 2, 3], "max_tokens": max_tokens, "seed": seed}
        envelope = m.Rollout(
            id=f"r{seed}",
            path="/v1/completions",
            model=model,
            blocks=[],
            prompt_tokens=3,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
        )
        async with await self.link.open(ROLLOUT_REQUEST) as stream:
            await stream.send(framing.encode(envelope) + json.dumps(request).encode())
            await stream.end()
            await stream.response()
            answer, content = await read_envelope(stream, ROLLOUT_ANSWER)
            while chunk := await stream.receive():
                content += chunk
        return answer, content


def row_of(run: ProxyRun, here: ReplicaLink) -> m.ReplicaRow:
    rows = run.snapshot(trio.current_time()).replicas
    return next(row for row in rows if row.name == here.replica.name)
