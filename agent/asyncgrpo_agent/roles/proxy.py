"""The proxy: the only machine that listens.

Replicas and trainers dial in; each sends a hello with its token on the control stream and is
accepted or refused. Rollouts of a trainer travel down the links of its run's replicas. What is
worth a backup (CA, token hashes, highest attempts) is in the state folder; all else comes back
from the agents when they redial.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.adapters import format_attempt, parse_attempt
from asyncgrpo_agent.core.sync import Sync
from asyncgrpo_agent.errors import ConfigError, LinkClosedError, LinkError, PeerProtocolError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.accept import serve_links
from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.roles.proxy_certificate import ServerCertificate
from asyncgrpo_agent.roles.proxy_rollouts import serve_rollout
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, ReplicaLink, TrainerSeat
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import CONTROL_REQUEST, NOT_FOUND_RESPONSE, OK_RESPONSE, path_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

PING_S: Final = 5.0  # the two together are how long a dead peer may go unnoticed
PING_DEADLINE_S: Final = 7.0
HELLO_S: Final = 10.0
FLEET_EVERY_S: Final = 1.0
_CANCEL: Final = 8  # RFC 9113, 7


def run(config: Config) -> int:
    """Serve until a signal comes. The result is the exit code."""
    return trio.run(_main, config)


async def _main(config: Config) -> int:
    proxy = Proxy(config)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(proxy.serve)
        notifier.ready()
        log.info("proxy.listening", address=address, version=__version__)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("proxy.stopping", signal=signal.Signals(number).name)
                break
        notifier.stopping()
        await proxy.leave()
        nursery.cancel_scope.cancel()
    return 0


@dataclass(slots=True)
class Proxy:
    """All runs of this proxy, and the doors into them."""

    config: Config
    runs: dict[str, ProxyRun] = field(default_factory=dict)
    admission: Admission = field(init=False)
    _listeners: list[trio.SocketListener] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config.state_dir)

    async def serve(self, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        host, port = host_port(self.config.proxy.listen)
        self._listeners = await _listen(host, port)
        bound = self._listeners[0].socket.getsockname()[1]
        certificate = ServerCertificate(self.config)
        task_status.started(f"{host}:{bound}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_progress)
            nursery.start_soon(self.admission.watch)
            nursery.start_soon(certificate.keep)
            await serve_links(self._listeners, certificate.context, self._serve_link)

    async def leave(self) -> None:
        """Say goodbye on every link, so that nobody takes the end for a loss.

        Rollouts without an answer are not waited for: they may take minutes, and the trainer's
        agent sends them again when a proxy is back. Trainers go first, so that nothing is tried
        elsewhere when the replicas go.
        """
        for listener in self._listeners:
            await listener.aclose()
        reason = "the proxy is stopping"
        for run_ in self.runs.values():
            for replica in run_.fleet:
                run_.note(replicas.drain(replica, reason, trio.current_time()))
        runs = self.runs.values()
        await _close_all([run_.trainer.link for run_ in runs if run_.trainer], reason)
        await _close_all([here.link for run_ in runs for here in run_.links.values()], reason)

    async def _watch_progress(self) -> None:
        while True:
            await trio.sleep(1.0)
            now = trio.current_time()
            for run_ in self.runs.values():
                for replica in run_.fleet:
                    run_.note(replicas.check_progress(replica, now))

    # --- one connection -------------------------------------------------------------------

    async def _serve_link(self, link: Link, alpn: str, _host: str) -> None:
        try:
            await self._serve_peer(link, alpn)
        finally:
            self.admission.leave(link)

    async def _serve_peer(self, link: Link, alpn: str) -> None:
        if alpn == m.ALPN_FORWARD:
            visitor = Visitor(self, link)
            await link.run(visitor.serve_stream)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, _refuse_stream)
            with suppress(LinkError):  # the link itself says why it ended
                await self._serve_replica(link)
            await link.aclose("control stream ended")
            nursery.cancel_scope.cancel()

    async def _register(self, link: Link, control: ProxyChannel, role: str) -> m.Hello | None:
        """The hello of a peer that may come in; None after it was refused."""
        with trio.move_on_after(HELLO_S):
            hello = await control.receive()
            if not isinstance(hello, m.Hello):
                raise PeerProtocolError(f"{type(hello).__name__} before hello", where=link.peer)
            refusal = self.admission.admit(link, hello, role)
            if refusal is None:
                return hello
            log.warning(
                "link.refused", peer=link.peer, role=role, name=hello.name, reason=refusal.reason
            )
            await _refuse(link, control, refusal)
            return None
        log.warning("link.refused", peer=link.peer, role=role, reason="no hello in time")
        return None

    def _accepted(self, name: str, attempt: str, live: list[str]) -> m.Accepted:
        addresses = self.config.proxy.public_addresses
        return m.Accepted(name, attempt, PING_S, PING_DEADLINE_S, live, addresses)

    # --- replicas -------------------------------------------------------------------------

    async def _serve_replica(self, link: Link) -> None:
        stream = await link.open(CONTROL_REQUEST)
        await stream.response()
        control: ProxyChannel = ControlChannel(stream, FROM_DIALLER)
        hello = await self._register(link, control, "replica")
        if hello is None:
            return
        run_ = self.run_named(hello.run)
        run_.attempt_seen = max(run_.attempt_seen, hello.attempt_seen)
        await self._end_ghost(run_, hello.instance)
        name, now = run_.free_name(hello.name), trio.current_time()
        replica = run_.fleet.join(name, hello.instance, hello.capacity, now)
        here = ReplicaLink(replica=replica, link=link, control=control)
        run_.links[name] = here
        reason = "link ended"
        try:
            await self._keep_replica(run_, here, hello)
        except LinkError as error:
            reason = str(error)
            raise
        finally:
            run_.leave(here, reason, trio.current_time())

    async def _end_ghost(self, run_: ProxyRun, instance: str) -> None:
        """The same process dials again before the loss of its old link was noticed."""
        for ghost in list(run_.links.values()):
            if ghost.replica.instance == instance:
                run_.leave(ghost, "replaced by a newer link", trio.current_time())
                await ghost.link.aclose("replaced by a newer link")

    async def _keep_replica(self, run_: ProxyRun, here: ReplicaLink, hello: m.Hello) -> None:
        """Accept, tell what the run is at, then listen until the link ends."""
        link, control, name = here.link, here.control, here.replica.name
        link.authenticated(AUTHENTICATED, PING_S, PING_DEADLINE_S)
        await control.send(self._accepted(name, run_.attempt, run_.live))
        log.info(
            "replica.joined",
            run=run_.name,
            replica=name,
            peer=link.peer,
            version=hello.agent_version,
        )
        if run_.finished:
            await control.send(m.Finish(run_.finished))
        for announce in list(run_.known.values())[-1:]:
            await control.send(m.Announce(announce.adapter, announce.commit, run_.live))
        while True:
            await self._from_replica(run_, here, await control.receive())

    async def _from_replica(
        self, run_: ProxyRun, here: ReplicaLink, message: m.FromDialler
    ) -> None:
        replica, now = here.replica, trio.current_time()
        match message:
            case m.EngineUp(engine=engine):
                self._engine_up(run_, here, engine)
            case m.EngineDown(reason=reason):
                here.engine = None
                run_.note(replicas.engine_down(replica, reason, now))
            case m.Holdings(loaded=loaded):
                run_.holds(replica.name, loaded, now)
            case m.Ack():
                if message.ok:
                    replica.loaded |= {message.adapter.name}
                await run_.ack(replica.name, message, now)
            case m.Progress():
                replicas.progressed(replica, message.running, message.generated_tokens, now)
                replica.paused_s = message.paused_s
                run_.note(replicas.check_progress(replica, now))
            case m.Draining(reason=reason):
                run_.note(replicas.drain(replica, reason, now))
            case _:
                raise PeerProtocolError(f"{type(message).__name__} from a replica")

    def _engine_up(self, run_: ProxyRun, here: ReplicaLink, engine: m.EngineFacts) -> None:
        reason = run_.mismatch(here.replica.name, engine)
        if reason is not None:
            log.error("replica.mismatch", run=run_.name, replica=here.replica.name, reason=reason)
            run_.note(replicas.engine_down(here.replica, f"refused: {reason}", trio.current_time()))
            return
        here.engine = engine
        run_.note(replicas.engine_up(here.replica, trio.current_time()))

    def run_named(self, name: str) -> ProxyRun:
        return self.runs.setdefault(name, ProxyRun(name))

    # --- trainers -------------------------------------------------------------------------

    async def serve_trainer(self, link: Link, stream: LinkStream, visitor: Visitor) -> None:
        """The control stream of a trainer's agent."""
        control: ProxyChannel = ControlChannel(stream, FROM_DIALLER)
        await stream.respond(OK_RESPONSE)
        hello = await self._register(link, control, "trainer")
        if hello is None:
            return
        run_ = self.run_named(hello.run)
        attempt = self._attempt(run_, hello)
        if attempt is None:
            reason = f"attempt {hello.attempt} was superseded by {run_.attempt}"
            await _refuse(link, control, m.Refused("permanent", reason))
            return
        if run_.trainer is not None:  # its messages no longer count from here on
            await run_.trainer.link.aclose(f"superseded by attempt {attempt}")
        run_.attempt, run_.finished = attempt, ""
        link.authenticated(AUTHENTICATED, PING_S, PING_DEADLINE_S)
        await control.send(self._accepted(hello.name, attempt, run_.live))
        run_.trainer = here = TrainerSeat(link=link, control=control)
        visitor.run = run_
        log.info("trainer.joined", run=run_.name, attempt=attempt, peer=link.peer)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_push_fleet, run_, control)
                while True:
                    message = await control.receive()
                    if run_.trainer is not here:
                        raise LinkClosedError(f"superseded by attempt {run_.attempt}")
                    await self._from_trainer(run_, control, message, nursery)
        finally:
            if run_.trainer is here:
                run_.trainer = None
            visitor.run = None
            log.info("trainer.left", run=run_.name, attempt=attempt)

    def _attempt(self, run_: ProxyRun, hello: m.Hello) -> str | None:
        """A new attempt for a trainer that starts, its own for one that comes back."""
        highest = identity.highest_attempt(self.config.state_dir, run_.name)
        if hello.attempt:
            try:
                number = parse_attempt(hello.attempt).number
            except ValueError as error:
                raise PeerProtocolError(str(error), where=f"trainer of run {run_.name}") from error
            other = run_.attempt not in ("", hello.attempt) and number == highest
            return hello.attempt if number >= highest and not other else None
        seen = max(run_.attempt_seen, hello.attempt_seen)
        number = identity.next_attempt(self.config.state_dir, run_.name, seen=seen)
        run_.known.clear()
        run_.live.clear()
        run_.syncs.clear()
        return format_attempt(number, secrets.token_hex(2))

    async def _from_trainer(
        self,
        run_: ProxyRun,
        control: ProxyChannel,
        message: m.FromDialler,
        nursery: trio.Nursery,
    ) -> None:
        match message:
            case m.Published():
                sync = await run_.publish(message)
                nursery.start_soon(_follow_sync, run_, control, message.adapter, sync)
            case m.Retired():
                await run_.retire(message)
            case m.RunEnded(ok=ok, reason=reason):
                log.info("run.ended", run=run_.name, ok=ok, reason=reason)
                if ok:
                    run_.finished = reason
                    await run_.tell_replicas(m.Finish(reason))
            case _:
                raise PeerProtocolError(f"{type(message).__name__} from a trainer")


@dataclass(slots=True)
class Visitor:
    """One ordinary HTTP/2 connection: a trainer's agent once it has registered, else a stranger."""

    proxy: Proxy
    link: Link
    run: ProxyRun | None = None

    async def serve_stream(self, stream: LinkStream) -> None:
        path = path_of(stream.request_headers)
        if path == m.CONTROL_PATH and self.run is None:
            await self.proxy.serve_trainer(self.link, stream, self)
        elif path == m.ROLLOUT_PATH and self.run is not None:
            limit = self.proxy.config.proxy.queue_limit
            await serve_rollout(self.run, stream, limit)
        elif path == "/health":
            await stream.respond(OK_RESPONSE)
            await stream.send(b"ok\n")
            await stream.end()
        else:
            await stream.respond(NOT_FOUND_RESPONSE)
            await stream.end()


async def _close_all(links: list[Link], reason: str) -> None:
    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(link.aclose, reason)


async def _refuse(link: Link, control: ProxyChannel, refusal: m.Refused) -> None:
    """Say so and close; closing sends what is queued first."""
    await control.send(refusal)
    await link.aclose("refused")


async def _refuse_stream(stream: LinkStream) -> None:
    """A replica is the HTTP/2 server of its link and cannot open streams."""
    stream.reset(_CANCEL)


async def _push_fleet(run_: ProxyRun, control: ProxyChannel) -> None:
    while True:
        await control.send(run_.snapshot(trio.current_time()))
        await run_.changed(trio.current_time() + FLEET_EVERY_S)
        await trio.sleep(0.05)  # a burst of changes makes one message


async def _follow_sync(
    run_: ProxyRun, control: ProxyChannel, adapter: m.Adapter, sync: Sync
) -> None:
    while not sync.verdict(trio.current_time()).done:
        await run_.changed(sync.deadline())
    report = run_.report(sync, adapter, trio.current_time())
    level = log.warning if report.timed_out or report.failed else log.info
    level(
        "sync.done",
        run=run_.name,
        adapter=sync.adapter,
        reason=report.reason,
        elapsed_s=report.elapsed_s,
    )
    await control.send(report)


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise ConfigError(
            f"cannot listen: {error.strerror or error}",
            where=f"proxy.listen {host}:{port}",
            fix="Stop the program that holds the port, or choose another: --listen HOST:PORT",
        ) from error
