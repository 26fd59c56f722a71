"""The replicas of a scripted run: real links and real messages, and no engine behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import LinkClosedError, LinkError
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ROLLOUT, ControlChannel, read_envelope
from asyncgrpo_agent.net.dial import dial, keep_dialled
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.tls import SERVER_NAME, client_context
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE, path_of
from asyncgrpo_agent.wire.host_proof import with_proof
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from fakes.backend import ENGINE
from fakes.scripted_past import REFUSAL, Script, ack_phases

PROGRESS_S = 1.0
LOST_AFTER_S = 6.0
SKEW_S = 8.0
CAPACITY = 64
OTHER_BYTES = "0bad0bad0bad"  # a digest that no trainer announces

Control = ControlChannel[m.FromDialler, m.FromAcceptor]


async def keep_dialling(
    join: Join, alpn: str, serve: Callable[[Link], Awaitable[None]], rng: Random
) -> None:
    """One link after the other, for ever."""
    context = client_context(join.ca_der, alpn)

    async def connect(address: str) -> Link:
        client = alpn == m.ALPN_FORWARD
        return await dial(
            address, context=context, server_name=SERVER_NAME, alpn=alpn, client=client, environ={}
        )

    backoff = Backoff(rng, base_s=0.3, cap_s=1.0)
    await keep_dialled(lambda: join.addresses, connect, serve, backoff=backoff)


@dataclass
class ScriptedReplica:
    """One of them. What it does wrong, if anything, is in the script."""

    script: Script
    name: str
    join: Join
    unix_time_s: Callable[[], float]
    rng: Random
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    loaded: list[str] = field(default_factory=list)
    running: int = 0
    generated: int = 0
    is_lost: bool = False

    async def run(self) -> None:
        await keep_dialling(self.join, m.ALPN_REVERSED, self._serve, self.rng)

    async def _serve(self, link: Link) -> None:
        async def handle(stream: LinkStream) -> None:
            if path_of(stream.request_headers) == m.CONTROL_PATH:
                await self._report(link, stream)
            else:
                await self._answer(stream)

        with trio.CancelScope() as scope:
            if self.name in self.script.lost and not self.is_lost:
                self.is_lost = True
                scope.deadline = trio.current_time() + LOST_AFTER_S
            await link.run(handle)
        if scope.cancelled_caught:
            raise LinkClosedError("lost by its script")

    async def _report(self, link: Link, stream: LinkStream) -> None:
        await stream.respond(OK_RESPONSE)
        control: Control = ControlChannel(stream, FROM_ACCEPTOR)
        challenge = await control.receive()
        assert isinstance(challenge, m.Challenge)
        hello = m.Hello(
            protocol=m.PROTOCOL,
            role="replica",
            run=self.script.run,
            name=self.name,
            instance=f"{self.script.run}-{self.name}",
            agent_version="0.1.0",
            token=self.join.token,
            capacity=CAPACITY,
            price_per_hour=0.0 if self.name.endswith("5") else 1.9,
        )
        await control.send(with_proof(hello, challenge.nonce, self.key))
        accepted = await control.receive()
        assert isinstance(accepted, m.Accepted), accepted
        link.authenticated(AUTHENTICATED, accepted.ping_s, accepted.ping_deadline_s)
        if self.name in self.script.joining:
            await control.send(m.EngineDown("vLLM is starting: loading weights, 62 %"))
            await trio.sleep_forever()
        engine = msgspec.structs.replace(ENGINE, base_model=self.script.model)
        await control.send(m.EngineUp(engine))
        await control.send(m.Holdings(self.loaded))
        if self.name in self.script.draining:
            await control.send(m.Draining("its host is needed for something else"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._progress, control)
            while True:
                match await control.receive():
                    case m.Announce(adapter=adapter, live=live):
                        nursery.start_soon(self._load, control, adapter, live)
                    case m.Retire(live=live):
                        self.loaded = [name for name in self.loaded if name in live]

    async def _load(self, control: Control, adapter: m.Adapter, live: list[str]) -> None:
        if adapter.name in self.loaded or self.name in self.script.draining:
            return
        if self.name in self.script.refuses:
            await control.send(m.Ack(adapter, False, REFUSAL, {}))
            return
        phases_s = ack_phases(self.script, self.name, adapter.version)
        await trio.sleep(phases_s["acked"])
        kept = [name for name in self.loaded if name in live]
        if self.name in self.script.other_bytes:
            self.loaded = [*kept, adapter.name[: -len(OTHER_BYTES)] + OTHER_BYTES]
            await control.send(m.Holdings(self.loaded))
            return
        self.loaded = [*kept, adapter.name]
        with suppress(LinkError):
            await control.send(m.Ack(adapter, True, "", phases_s))
            await control.send(m.Holdings(self.loaded))

    async def _progress(self, control: Control) -> None:
        while True:
            self.generated += int(self.running * 70 * PROGRESS_S)
            skew_s = SKEW_S if self.name in self.script.skewed else self.rng.uniform(-0.004, 0.004)
            used = min(0.98, 0.08 + self.running / CAPACITY)
            now = self.unix_time_s() + skew_s
            await control.send(m.Progress(self.running, 0, self.generated, used, 0.0, {}, now))
            await trio.sleep(PROGRESS_S)

    async def _answer(self, stream: LinkStream) -> None:
        envelope, _ = await read_envelope(stream, ROLLOUT)
        while await stream.receive():
            pass
        self.running += 1
        try:
            ok = self.name not in self.script.fails
            await trio.sleep(self.script.rollout_s * self.rng.uniform(0.5, 1.5) if ok else 0.05)
        finally:
            self.running -= 1
        answer = m.RolloutAnswer(
            status=200 if ok else 500,
            content_type="application/json",
            encoding="identity",
            replica=self.name,
            hop="" if ok else "vllm",
            reason="" if ok else "CUDA error: an illegal memory access was encountered",
        )
        await stream.respond(OK_RESPONSE)
        await stream.send(framing.encode(answer) + (b"{}" if envelope else b""))
        await stream.end()
