"""Replicas that join, leave and come back all the time, on real links to the real proxy."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.sections import Agent, Config
from asyncgrpo_agent.config.sections import Proxy as ProxySection
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ROLLOUT, ControlChannel, read_envelope
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.engine_client import EngineClient
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.net.tls import SERVER_NAME, client_context
from asyncgrpo_agent.roles.proxy import Proxy
from asyncgrpo_agent.roles.replica_rollouts import answer_rollout
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE, path_of
from asyncgrpo_agent.wire.host_proof import with_proof
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.adapters import write_adapter
from fakes.backend import ENGINE
from fakes.vllm import FakeVllm

pytestmark = pytest.mark.slow

HOSTS = 4
LEAVES = 52  # of all hosts together
WORKERS = 24
LIVE = 3
PATIENCE_S = 60.0


@dataclass
class Host:
    """One host of a name that lasts; each stay is a new process with an empty engine."""

    name: str
    join: Join
    address: str
    folders: dict[str, Path]  # of adapters, by physical name
    engine: FakeVllm
    client: EngineClient
    rng: Random
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    stays: int = 0
    served: int = 0
    lacked: list[str] = field(default_factory=list)  # adapters that were asked for and not there
    in_flight: int = 0
    _control: ControlChannel[m.FromDialler, m.FromAcceptor] | None = None

    async def stay(self, over: Callable[[], bool], *, graceful: bool) -> None:
        """Until that is `over`; then it drains, or its link breaks."""
        self.engine.lose_adapters()
        self.stays += 1
        link = await dial(
            self.address,
            context=client_context(self.join.ca_der, m.ALPN_REVERSED),
            server_name=SERVER_NAME,
            alpn=m.ALPN_REVERSED,
            client=False,
            environ={},
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, link)
            while not over():  # noqa: ASYNC110 - real sockets, and nothing else to wait for
                await trio.sleep(0.005)
            if graceful:
                assert self._control is not None
                await self._control.send(m.Draining("its host goes"))
                while self.in_flight:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.005)
                await link.aclose("its host goes")
            nursery.cancel_scope.cancel()

    def has_served(self, goal: int) -> bool:
        return self.served >= goal

    async def _serve(self, link: Link) -> None:
        async def handle(stream: LinkStream) -> None:
            if path_of(stream.request_headers) == m.CONTROL_PATH:
                await self._obey(link, stream)
            else:
                await self._answer(stream)

        with suppress(LinkError):
            await link.run(handle)

    async def _obey(self, link: Link, stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        control: ControlChannel[m.FromDialler, m.FromAcceptor]
        control = ControlChannel(stream, FROM_ACCEPTOR)
        challenge = await control.receive()
        assert isinstance(challenge, m.Challenge)
        hello = m.Hello(
            protocol=m.PROTOCOL,
            role="replica",
            run=self.join.run,
            name=self.name,
            instance=f"{self.name}-{self.stays}",
            agent_version=__version__,
            token=self.join.token,
            capacity=8,
        )
        await control.send(with_proof(hello, challenge.nonce, self.key))
        accepted = await control.receive()
        assert isinstance(accepted, m.Accepted), accepted
        assert accepted.name == self.name
        link.authenticated(AUTHENTICATED, accepted.ping_s, accepted.ping_deadline_s)
        self._control = control
        await control.send(m.EngineUp(ENGINE))
        for name in accepted.live[-1:]:  # as a real one: the newest by itself, others when asked
            await self._load(name)
        await control.send(m.Holdings(list(self.engine.adapters)))
        while True:
            match await control.receive():
                case m.Announce(adapter=adapter):
                    await trio.sleep(self.rng.uniform(0, 0.03))
                    await self._load(adapter.name)
                    await control.send(m.Ack(adapter, True, "", {}))
                case m.Retire(live=live):
                    for name in set(self.engine.adapters) - set(live):
                        await self.client.unload_adapter(name)
                    await control.send(m.Holdings(list(self.engine.adapters)))

    async def _load(self, name: str) -> None:
        if name not in self.engine.adapters:
            await self.client.load_adapter(name, str(self.folders[name]))

    async def _answer(self, stream: LinkStream) -> None:
        envelope, rest = await read_envelope(stream, ROLLOUT)
        if envelope.model not in self.engine.adapters:
            self.lacked.append(envelope.model)
        body = bytearray(rest)
        self.in_flight += 1
        try:
            while chunk := await stream.receive():
                body += chunk
            answer, content = await answer_rollout(
                self.name, self.client, "", envelope, bytes(body)
            )
            await stream.respond(OK_RESPONSE)
            await stream.send(framing.encode(answer) + content)
            await stream.end()
            self.served += 1
        finally:
            self.in_flight -= 1


@dataclass
class Trainer:
    """Rollouts without a pause, each of one of the live versions, and a new one now and then."""

    link: TrainerLink
    folders: dict[str, Path]
    folder: Path
    live: list[m.Adapter] = field(default_factory=list)
    answers: list[tuple[str, CompletedRollout]] = field(default_factory=list)
    retired: int = 0
    in_use: dict[str, int] = field(default_factory=dict)

    async def publish(self, version: int) -> None:
        folder = write_adapter(self.folder / f"v{version}", seed=version)
        digest = f"{version:064x}"
        name = f"demo.{self.link.attempt}.v{version:06d}.{digest[-12:]}"
        adapter = m.Adapter(name, self.link.attempt, version, digest)
        self.folders[name] = folder
        self.live.append(adapter)
        names = [one.name for one in self.live]
        await self.link.tell(m.Published(adapter, f"c{version}", names, 0.5, 5.0, 1, {}))

    async def retire(self) -> None:
        """As TRL: unload what is older than a rollout may be. Nobody asks for it any more."""
        for one in self.live[:-LIVE]:
            if not self.in_use.get(one.name):
                self.live.remove(one)
                await self.link.tell(m.Retired([one.name], [left.name for left in self.live]))
                self.retired += 1

    def is_done(self) -> bool:
        return not sum(self.in_use.values())

    async def work(self, number: int, over: trio.Event) -> None:
        rng = Random(number)
        while not over.is_set():
            name = rng.choice(self.live[-2:]).name
            self.in_use[name] = self.in_use.get(name, 0) + 1
            seed = len(self.answers)
            value = {"model": name, "prompt": [1, 2, 3], "max_tokens": 8, "seed": seed}
            rollout = m.Rollout(
                id=f"{number}-{seed}",
                path="/v1/completions",
                model=name,
                blocks=[rng.randrange(8)],
                prompt_tokens=3,
                max_tokens=8,
                deadline_s=PATIENCE_S,
            )
            answer = await self.link.complete(rollout, json.dumps(value).encode())
            self.in_use[name] -= 1
            self.answers.append((name, answer))


async def test_joining_leaving_and_coming_back_fails_no_rollout(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    proxy, address = await started_proxy(nursery, tmp_path / "proxy")
    folders: dict[str, Path] = {}
    over = trio.Event()
    trainer = Trainer(await joined_trainer(nursery, tmp_path, address), folders, tmp_path)
    join = join_of(tmp_path / "proxy", "replica", address)
    await trainer.publish(1)
    hosts = []
    for number in range(HOSTS):
        engine = FakeVllm(model=ENGINE.base_model, tokens_per_s=400.0)
        path = str(tmp_path / f"{number}.sock")
        await nursery.start(engine.run, path)
        rng = Random(number)
        hosts.append(Host(f"r{number}", join, address, folders, engine, EngineClient(path), rng))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as working:
            for number in range(WORKERS):
                working.start_soon(trainer.work, number, over)
            async with trio.open_nursery() as churning:
                for host in hosts:
                    churning.start_soon(come_and_go, host)
                version = 1
                while any(host.stays < LEAVES // HOSTS for host in hosts):
                    version += 1
                    await trainer.publish(version)
                    await trio.sleep(0.2)
                    await trainer.retire()
            over.set()
            working.start_soon(partial(hosts[0].stay, trainer.is_done, graceful=True))
    assert [answer for _, answer in trainer.answers if answer.status != 200] == []
    for name, answer in trainer.answers:
        assert json.loads(answer.body)["model"] == name
    assert {host.name: host.lacked for host in hosts} == {host.name: [] for host in hosts}
    assert sum(host.stays for host in hosts) >= LEAVES
    assert trainer.retired > 0
    assert proxy.runs["demo"].holding.waiting == 0
    for host in hosts:
        await host.client.__aexit__(None, None, None)


async def come_and_go(host: Host) -> None:
    """Every other time its link breaks with rollouts on it, and its successor is back at once."""
    for number in range(LEAVES // HOSTS):
        goal = host.served + host.rng.randrange(1, 16)
        await host.stay(partial(host.has_served, goal), graceful=number % 2 == 0)
        if host.rng.random() < 0.5:
            await trio.sleep(host.rng.uniform(0, 0.1))


async def started_proxy(nursery: trio.Nursery, state: Path) -> tuple[Proxy, str]:
    identity.ensure_run(state, "demo")
    listen = ProxySection(listen="127.0.0.1:0")
    proxy = Proxy(Config(role="proxy", agent=Agent(state_dir=str(state)), proxy=listen))
    return proxy, await nursery.start(proxy.serve)


def join_of(state: Path, role: Any, address: str) -> Join:
    line = identity.create_join(state, role=role, run="demo", addresses=[address], now_unix_s=0.0)
    return decode(line)


async def joined_trainer(nursery: trio.Nursery, folder: Path, address: str) -> TrainerLink:
    async def registered() -> None:
        pass

    link = TrainerLink(
        join=join_of(folder / "proxy", "trainer", address),
        instance="t1",
        name="trainer",
        rng=Random(0),
        on_message=lambda message: None,
        on_registered=registered,
        on_addresses=lambda addresses: None,
        max_staleness=2,
    )
    carrier = await dial(
        address,
        context=client_context(link.join.ca_der, m.ALPN_FORWARD),
        server_name=SERVER_NAME,
        alpn=m.ALPN_FORWARD,
        client=True,
        environ={},
    )
    nursery.start_soon(link.serve, carrier)
    await link.registered()
    return link
