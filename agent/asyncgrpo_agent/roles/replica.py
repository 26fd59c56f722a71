"""A replica: one vLLM, one link to the proxy, adapters from the bucket.

Rollouts come down the link that this host opened; nothing listens but vLLM, on a Unix socket that
only this user can reach. A signal, or the end of the run, drains: no new rollouts, those in flight
finish, vLLM stops, exit 0.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Final

import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import (
    EngineError,
    LinkError,
    PeerProtocolError,
    RegistrationRefusedError,
)
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.control import FROM_ACCEPTOR, ROLLOUT, ControlChannel, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.procs import vllm
from asyncgrpo_agent.roles.registration import (
    ProxyAddresses,
    host_name,
    load_join,
    new_instance,
    refusal_error,
    stay_registered,
)
from asyncgrpo_agent.roles.replica_adapters import Loader
from asyncgrpo_agent.roles.replica_engine import EngineHost
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.models import model_digest
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import OK_RESPONSE, path_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

PROGRESS_EVERY_S: Final = 2.0
COMPRESS_OVER_BYTES: Final = 16 << 10
MAX_REQUEST_BYTES: Final = 16 << 20

Channel = ControlChannel[m.FromDialler, m.FromAcceptor]


def run(config: Config) -> int:
    """Serve until the run ends or a signal comes. The result is the exit code."""
    return trio.run(_main, config)


def engine_command_line(config: Config) -> str:
    """What `--print-engine-command` shows."""
    argv, additions = vllm.engine_command(_spec(config, Path("vllm.sock")))
    return vllm.shell_line(argv, additions)


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
    join = load_join(config, "replica")
    digest = await trio.to_thread.run_sync(model_digest, Path(config.model.path))
    with vllm.socket_dir() as folder:
        agent = ReplicaAgent(config, join, _spec(config, folder / "vllm.sock"), digest)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, agent)
            nursery.start_soon(agent.run)
            await agent.stopping.wait()
            await agent.drain()
            nursery.cancel_scope.cancel()
    log.info("replica.stopped", reason=agent.stop_reason)
    return 0


async def _stop_on_signal(agent: ReplicaAgent) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
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
    stop_reason: str = ""
    in_flight: int = 0
    _link: Link | None = None
    _control: Channel | None = None
    _idle: trio.Event = field(default_factory=trio.Event)
    _state_changed: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.instance = new_instance()
        self.addresses = ProxyAddresses(self.config, self.join)
        self.engine = EngineHost(self.config, self.spec, self.digest, self._engine_changed)
        self.loader = Loader(self.config, self.join, self.engine, self.tell)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.engine.run)
            nursery.start_soon(self._stay_registered)
            nursery.start_soon(self.loader.run)
            nursery.start_soon(self.loader.watch)
            nursery.start_soon(self._report_progress)
            nursery.start_soon(self._report_engine)

    # --- stopping -------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.stopping.set()

    async def drain(self) -> None:
        """Take nothing new, finish what runs, within `replica.drain_s`."""
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
        await control.send(
            m.Hello(
                protocol=m.PROTOCOL,
                role="replica",
                run=self.join.run,
                name=host_name(self.config),
                instance=self.instance,
                agent_version=__version__,
                token=self.join.token,
                capacity=self.config.replica.capacity,
                attempt_seen=self.loader.high_water.value[0],
            )
        )
        answer = await control.receive()
        if isinstance(answer, m.Refused):
            raise refusal_error(answer, link.peer)
        if not isinstance(answer, m.Accepted):
            raise PeerProtocolError(f"{type(answer).__name__} before accept", where=link.peer)
        link.authenticated(AUTHENTICATED, answer.ping_s, answer.ping_deadline_s)
        self.addresses.remember(answer.addresses)
        log.info("link.up", proxy=link.peer, name=answer.name)
        self.loader.accept(answer.attempt, answer.live)
        self._link, self._control = link, control
        notifier.ready()
        try:
            # Only now, so that nothing that happens during the registration is missed.
            await self._tell_engine()
            await control.send(m.Holdings(list(self.loader.loaded)))
            while True:
                self._obey(await control.receive())
        finally:
            self._link = self._control = None

    def _obey(self, message: m.FromAcceptor) -> None:
        match message:
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
        await self.tell(m.EngineDown(self.engine.reason) if facts is None else m.EngineUp(facts))

    async def _report_progress(self) -> None:
        """vLLM's own counters, which tell a long rollout from a hung engine."""
        paused_s, last = 0.0, trio.current_time()
        while True:
            await trio.sleep(PROGRESS_EVERY_S)
            if self.engine.facts is None:
                last = trio.current_time()
                continue
            try:
                counters = await self.engine.client.counters()
                is_paused = await self.engine.client.is_paused()
            except EngineError as error:
                log.warning("engine.silent", reason=str(error))
                continue
            now = trio.current_time()
            paused_s, last = paused_s + (now - last if is_paused else 0.0), now
            await self.tell(
                m.Progress(
                    running=counters.running,
                    waiting=counters.waiting,
                    generated_tokens=counters.generated_tokens,
                    kv_used=counters.kv_used,
                    paused_s=paused_s,
                )
            )

    # --- rollouts -------------------------------------------------------------------------

    async def _serve_rollout(self, stream: LinkStream) -> None:
        envelope, rest = await read_envelope(stream, ROLLOUT)
        body = bytearray(rest)
        while chunk := await stream.receive():
            body += chunk
            if len(body) > MAX_REQUEST_BYTES:
                raise PeerProtocolError(f"rollout of over {MAX_REQUEST_BYTES} bytes")
        await stream.respond(OK_RESPONSE)
        self.in_flight += 1
        self.loader.in_use[envelope.model] += 1
        try:
            answer, content = await self._complete(envelope, bytes(body))
            await stream.send(framing.encode(answer) + content)
            await stream.end()
        finally:
            self.loader.released(envelope.model)
            self.in_flight -= 1
            self._idle.set()
            self._idle = trio.Event()

    async def _complete(self, envelope: m.Rollout, body: bytes) -> tuple[m.RolloutAnswer, bytes]:
        name = host_name(self.config)
        if self.engine.facts is None:
            return _failed(name, "replica", 503, self.engine.reason, may_have_run=False), b""
        try:
            status, content_type, content = await self.engine.client.complete(
                envelope.path, body, envelope.deadline_s
            )
        except EngineError as error:
            return _failed(name, "vllm", 502, str(error), may_have_run=True), b""
        deflate = len(content) > COMPRESS_OVER_BYTES
        if deflate:
            # In a thread: 2.4 MB take 40 ms, and other rollouts must not wait for it.
            content = await trio.to_thread.run_sync(zlib.compress, content, 1)
        answer = m.RolloutAnswer(
            status=status,
            content_type=content_type,
            encoding="deflate" if deflate else "identity",
            replica=name,
            hop="" if status < 400 else "vllm",
        )
        return answer, content


def _failed(
    replica: str, hop: str, status: int, reason: str, *, may_have_run: bool
) -> m.RolloutAnswer:
    return m.RolloutAnswer(
        status=status,
        content_type="application/json",
        encoding="identity",
        replica=replica,
        hop=hop,
        may_have_run=may_have_run,
        reason=reason,
    )


async def _then(wait: Callable[[], object], act: Callable[[], None]) -> None:
    await wait()  # type: ignore[misc]
    act()
