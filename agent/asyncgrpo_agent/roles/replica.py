"""A replica: one vLLM, one link to the proxy, adapters from the bucket.

Rollouts come down the link that this host opened; nothing listens but vLLM, on a Unix socket that
only this user can reach. A signal, or the end of the run, drains: no new rollouts, those in flight
finish, vLLM stops, exit 0.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Final

import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import LinkError, PeerProtocolError, RegistrationRefusedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ROLLOUT, ControlChannel, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.procs import vllm
from asyncgrpo_agent.procs.environment import gpu_variables
from asyncgrpo_agent.procs.notice import noticed
from asyncgrpo_agent.procs.socket_dirs import socket_dir
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted
from asyncgrpo_agent.roles.registration import (
    ProxyAddresses,
    host_name,
    load_join,
    new_instance,
    refusal_error,
    stay_registered,
)
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_effect import EffectWatch
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.roles.replica_engine_watch import EngineWatch
from asyncgrpo_agent.roles.replica_exit import call_on_exit, until_idle
from asyncgrpo_agent.roles.replica_metrics import source_of
from asyncgrpo_agent.roles.replica_mirror import ReplicaMirror
from asyncgrpo_agent.roles.replica_model import model_of_replica
from asyncgrpo_agent.roles.replica_rollouts import answer_rollout
from asyncgrpo_agent.roles.telemetry import served
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.host_keys import ensure_host_key
from asyncgrpo_agent.store.mirror import Mirror
from asyncgrpo_agent.store.model_packs import is_pack
from asyncgrpo_agent.store.models import model_digest
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE, path_of
from asyncgrpo_agent.wire.host_proof import with_proof
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

MAX_REQUEST_BYTES: Final = 16 << 20

Channel = ControlChannel[m.FromDialler, m.FromAcceptor]


def run(config: Config) -> int:
    """Serve until the run ends or a signal comes. The result is the exit code."""
    return trio.run(_main, config)


def engine_command_line(config: Config) -> str:
    """What `--print-engine-command` shows."""
    argv, additions = vllm.engine_command(_spec(config, Path("vllm.sock")))
    return vllm.shell_line(argv, additions | gpu_variables(config.replica.gpus))


def _spec(config: Config, socket_path: Path) -> vllm.EngineSpec:
    engine = config.engine
    return vllm.EngineSpec(
        python=engine.python,
        module=engine.module,
        model_path=config.model.path,
        served_name=config.model_name,
        socket_path=str(socket_path),
        args=tuple(engine.args),
        env=engine.env,
        max_loras=engine.max_loras,
        max_lora_rank=engine.max_lora_rank,
        dtype=engine.dtype,
        cpu=not vllm.has_gpu(),
        trust_remote_code=config.model.trust_remote_code,
    )


async def _main(config: Config) -> int:
    notifier.watch_loop()
    join = load_join(config, "replica")
    digest = ""  # known once the model is here
    if config.model.path and not is_pack(Path(config.model.path)):
        digest = await trio.to_thread.run_sync(model_digest, Path(config.model.path))
    async with bucket_mounted(config):
        by_signal = await _run_agent(config, join, digest)
    if not by_signal:
        await call_on_exit(config.replica.on_exit_command)
    return 0


async def _run_agent(config: Config, join: Join, digest: str) -> bool:
    """Whether a signal had a part in its end."""
    with socket_dir() as folder:
        agent = ReplicaAgent(config, join, _spec(config, folder / "vllm.sock"), digest)
        telemetry = served(config.telemetry, source_of(agent))
        async with telemetry, trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, agent)
            nursery.start_soon(agent.run)
            await agent.stopping.wait()
            await agent.drain()
            nursery.cancel_scope.cancel()
    log.info("replica.stopped", reason=agent.stop_reason)
    return agent.signalled


async def _stop_on_signal(agent: ReplicaAgent) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            agent.signalled = True
            if agent.stopping.is_set():
                agent.hurry.set()
            agent.stop(f"stopped by {signal.Signals(number).name}")


@dataclass
class ReplicaAgent:
    """One process of one replica."""

    config: Config
    join: Join
    spec: vllm.EngineSpec
    digest: str
    stopping: trio.Event = field(default_factory=trio.Event)
    hurry: trio.Event = field(default_factory=trio.Event)
    signalled: bool = False
    stop_reason: str = ""
    in_flight: int = 0
    rollouts: int = 0  # that have come so far
    registrations: int = 0  # so far
    _link: Link | None = None
    _control: Channel | None = None
    _idle: trio.Event = field(default_factory=trio.Event)
    _state_changed: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.instance = new_instance()
        self.addresses = ProxyAddresses(self.config, self.join)
        self.host_key = ensure_host_key(self.config.state_dir, self.join.run)
        prepare = None if self.digest else self._have_model
        self.engine = EngineHost(self.config, self.spec, self.digest, self._engine_changed, prepare)
        self.loader = Loader(self.config, self.join, self.engine, self.tell)
        self.effect = EffectWatch(
            self.engine.client, self.config.model_name, lambda: self.loader.loaded
        )
        self.watch = EngineWatch(self.engine, self.loader, self.effect, self.tell)
        self.mirror = self._mirror() if self.config.bucket.source == "link" else None

    def _mirror(self) -> ReplicaMirror:
        """In the place where the loader looks for its bucket."""
        key = self.join.run_public_key
        mirror = Mirror(Path(self.config.bucket.path), self.join.run, key)
        return ReplicaMirror(mirror, self.loader, self.tell)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine.run)
            nursery.start_soon(self._stay_registered)
            nursery.start_soon(self.loader.run)
            nursery.start_soon(self.watch.run)
            nursery.start_soon(self._report_engine)
            nursery.start_soon(self.effect.run)
            nursery.start_soon(self._stop_when_idle)
            nursery.start_soon(self._stop_on_notice)

    # --- stopping -------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.stopping.set()

    async def _stop_when_idle(self) -> None:
        limit_s = self.config.replica.idle_exit_s
        await until_idle(
            limit_s, lambda: (self.engine.facts is not None, self.in_flight, self.rollouts)
        )
        self.stop(f"no rollout came for {limit_s:g} s")

    async def _stop_on_notice(self) -> None:
        """As by a signal: somebody else ends this host."""
        await noticed(self.config.replica.notice_command, self.config.replica.notice_every_s)
        self.signalled = True
        self.stop("the platform gives notice (replica.notice_command)")

    async def drain(self) -> None:
        """Take nothing new, finish what runs, within `replica.drain_s`."""
        notifier.ready()  # an end before it counts as a failure, also one in good order
        notifier.stopping()
        log.info("replica.draining", reason=self.stop_reason, in_flight=self.in_flight)
        await self.tell(m.Draining(self.stop_reason))
        with trio.move_on_after(self.config.replica.drain_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_then, self.hurry.wait, nursery.cancel_scope.cancel)
                while self.in_flight:
                    await self._idle.wait()
                nursery.cancel_scope.cancel()
        if self.in_flight:
            log.warning("replica.cut", in_flight=self.in_flight)
        if self._link is not None:
            await self._link.aclose(self.stop_reason)  # sends what is still queued

    # --- the link -------------------------------------------------------------------------

    async def _stay_registered(self) -> None:
        await stay_registered(
            self.addresses, self.join, role="replica", serve=self._serve_link, rng=SystemRandom()
        )

    async def _serve_link(self, link: Link) -> None:
        """Serve what the proxy asks for until the link ends. Raises its refusal, if that is why."""
        refusals: list[RegistrationRefusedError] = []

        async def serve_stream(stream: LinkStream) -> None:
            path = path_of(stream.request_headers)
            if path == m.CONTROL_PATH and self._control is None:
                try:
                    await self._serve_control(link, stream)
                except RegistrationRefusedError as error:
                    refusals.append(error)  # an error of a handler ends its stream only
            elif path == m.ROLLOUT_PATH and self._control is not None:
                await self._serve_rollout(stream)
            elif path == m.ADAPTER_PATH and self._control is not None and self.mirror is not None:
                await self.mirror.receive(stream)
            else:
                raise PeerProtocolError(f"unexpected request for {path}", where=link.peer)

        try:
            await link.run(serve_stream)
        except LinkError:
            if not refusals:
                raise
        if refusals:
            raise refusals[0]

    async def _serve_control(self, link: Link, stream: LinkStream) -> None:
        """Register on the stream that the proxy opened and obey it until it ends."""
        await stream.respond(OK_RESPONSE)
        control: Channel = ControlChannel(stream, FROM_ACCEPTOR)
        challenge = await control.receive()
        if not isinstance(challenge, m.Challenge):
            what = f"{type(challenge).__name__} before challenge"
            raise PeerProtocolError(what, where=link.peer)
        await control.send(with_proof(self._hello(), challenge.nonce, self.host_key))
        answer = await control.receive()
        if isinstance(answer, m.Refused):
            raise refusal_error(answer, link.peer)
        if not isinstance(answer, m.Accepted):
            raise PeerProtocolError(f"{type(answer).__name__} before accept", where=link.peer)
        link.authenticated(AUTHENTICATED, answer.ping_s, answer.ping_deadline_s)
        self.addresses.remember(answer.addresses)
        log.info("link.up", proxy=link.peer, name=answer.name)
        if answer.name != host_name(self.config):
            log.warning("replica.renamed", name=answer.name, wanted=host_name(self.config))
        self.loader.accept(answer.attempt, answer.live)
        self._link, self._control = link, control
        self.registrations += 1
        try:
            if self.stopping.is_set():  # its link broke while it drained
                await control.send(m.Draining(self.stop_reason))
            # Only now, so that nothing that happens during the registration is missed.
            await self._tell_engine()
            await control.send(m.Holdings(list(self.loader.loaded)))
            while True:
                self._obey(await control.receive(), link.peer)
        finally:
            self._link = self._control = None
            self.loader.unlinked()

    @property
    def is_linked(self) -> bool:
        return self._control is not None

    @property
    def rtt_s(self) -> float | None:
        return None if self._link is None else self._link.rtt_s

    def _hello(self) -> m.Hello:
        return m.Hello(
            protocol=m.PROTOCOL,
            role="replica",
            run=self.join.run,
            name=host_name(self.config),
            instance=self.instance,
            agent_version=__version__,
            token=self.join.token,
            capacity=self.config.replica.capacity,
            attempt_seen=self.loader.high_water.value[0],
            source=self.config.bucket.source,
            price_per_hour=self.config.replica.price_per_hour,
        )

    def _obey(self, message: m.FromAcceptor, peer: str) -> None:
        match message:
            case m.Refused():  # a newer process has the name
                raise refusal_error(message, peer)
            case m.Announce():
                self.loader.announced(message)
            case m.Retire(live=live):
                self.loader.retired(live)
            case m.Finish(reason=reason):
                self.stop(reason)
            case _:
                log.debug("message.ignored", message=type(message).__name__)

    async def tell(self, message: m.FromDialler) -> None:
        """Send to the proxy; without a link it hears the whole state when the link is back."""
        if self._control is None:
            return
        try:
            await self._control.send(message)
        except LinkError as error:
            log.debug("control.unsent", message=type(message).__name__, reason=str(error))

    # --- the engine -----------------------------------------------------------------------

    async def _have_model(self, tell: Callable[[str], None]) -> tuple[vllm.EngineSpec, str]:
        self.config, self.digest = await model_of_replica(self.config, self.join, tell)
        self.loader.config = self.config
        self.effect.base_model = self.config.model_name
        return _spec(self.config, Path(self.spec.socket_path)), self.digest

    def _engine_changed(self) -> None:
        self.loader.engine_changed()
        self._state_changed.set()

    async def _report_engine(self) -> None:
        """Tell the proxy whenever vLLM comes up or goes down, or its reason changes."""
        while True:
            await self._state_changed.wait()
            self._state_changed = trio.Event()
            notifier.status(self.engine.reason)
            await self._tell_engine()

    async def _tell_engine(self) -> None:
        facts = self.engine.facts
        if facts is not None and self._control is not None:
            notifier.ready()  # only now does it take rollouts
        await self.tell(m.EngineDown(self.engine.reason) if facts is None else m.EngineUp(facts))

    # --- rollouts -------------------------------------------------------------------------

    async def _serve_rollout(self, stream: LinkStream) -> None:
        self.rollouts += 1
        self.in_flight += 1  # from here on: one whose body is on its way is not cut by a drain
        try:
            await self._answer_rollout(stream)
        finally:
            self.in_flight -= 1
            self._idle.set()
            self._idle = trio.Event()

    async def _answer_rollout(self, stream: LinkStream) -> None:
        envelope, rest = await read_envelope(stream, ROLLOUT)
        body = bytearray(rest)
        while chunk := await stream.receive():
            body += chunk
            if len(body) > MAX_REQUEST_BYTES:
                raise PeerProtocolError(f"rollout of over {MAX_REQUEST_BYTES} bytes")
        self.loader.in_use[envelope.model] += 1
        try:
            serving = self.engine.client if self.engine.facts is not None else None
            answer, content = await answer_rollout(
                host_name(self.config), serving, self.engine.reason, envelope, bytes(body)
            )
            await stream.respond(OK_RESPONSE)  # only now: it leaves in one write with the answer
            await stream.send(framing.encode(answer) + content)
            await stream.end()
        finally:
            self.loader.released(envelope.model)


async def _then(wait: Callable[[], object], act: Callable[[], None]) -> None:
    await wait()  # type: ignore[misc]
    act()
