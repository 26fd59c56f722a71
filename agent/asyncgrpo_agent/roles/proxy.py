"""The proxy: the only machine that listens.

Replicas and trainers dial in; each sends a hello with its token on the control stream and is
accepted or refused. Rollouts of a trainer travel down the links of its run's replicas. What is
worth a backup (CA, token hashes, highest attempts, whose names the replicas' are) is in the state
folder; all else comes back from the agents when they redial.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent import __version__, dumps
from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.core import replicas
from asyncgrpo_agent.core.adapters import format_attempt, parse_attempt
from asyncgrpo_agent.core.contract import Terms
from asyncgrpo_agent.core.sync import Sync
from asyncgrpo_agent.errors import ConfigError, LinkClosedError, LinkError, PeerProtocolError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.accept import serve_links
from asyncgrpo_agent.net.carrier import Carrier
from asyncgrpo_agent.net.control import FROM_DIALLER, ControlChannel
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles import proxy_engines, proxy_snapshot
from asyncgrpo_agent.roles.proxy_adapters import Lending, Reader, is_asked_for
from asyncgrpo_agent.roles.proxy_admission import Admission, refuse
from asyncgrpo_agent.roles.proxy_alerts import AlertDesk
from asyncgrpo_agent.roles.proxy_certificate import ServerCertificate
from asyncgrpo_agent.roles.proxy_drain import DrainDesk
from asyncgrpo_agent.roles.proxy_names import ReplicaNames
from asyncgrpo_agent.roles.proxy_past import PastRuns
from asyncgrpo_agent.roles.proxy_records import RunRecords
from asyncgrpo_agent.roles.proxy_replica import ReplicaDoor
from asyncgrpo_agent.roles.proxy_rollouts import serve_rollout
from asyncgrpo_agent.roles.proxy_run import ProxyChannel, ProxyRun, Runs, TrainerSeat
from asyncgrpo_agent.roles.proxy_site import Site, Viewer
from asyncgrpo_agent.roles.proxy_upstream import take_seats
from asyncgrpo_agent.roles.proxy_usage import UsageBook
from asyncgrpo_agent.roles.telemetry import served
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.host_bindings import HostBindings
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.headers import NOT_FOUND_RESPONSE, OK_RESPONSE, path_of

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

FLEET_EVERY_S: Final = 1.0
_CANCEL: Final = 8  # RFC 9113, 7


def run(config: Config) -> int:
    """Serve until a signal comes. The result is the exit code."""
    return trio.run(_main, config)


async def _main(config: Config) -> int:
    notifier.watch_loop()
    proxy = Proxy(config)
    telemetry = served(config.telemetry, proxy.site.metrics.source)
    async with telemetry, trio.open_nursery() as nursery:
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
    runs: Runs = field(init=False)
    usage: UsageBook = field(init=False)
    admission: Admission = field(init=False)
    replica_door: ReplicaDoor = field(init=False)
    records: RunRecords = field(init=False)
    lending: Lending = field(init=False)
    site: Site = field(init=False)
    _listeners: list[trio.SocketListener] = field(default_factory=list)

    def __post_init__(self) -> None:
        state_dir, addresses = self.config.state_dir, self.config.proxy.public_addresses
        self.usage = UsageBook(state_dir)
        self.runs = Runs(self.usage.of)
        self.admission = Admission(state_dir, addresses=addresses)
        names = ReplicaNames(self.runs, HostBindings(state_dir, self.admission.unix_time_s()))
        self.replica_door = ReplicaDoor(self.admission, names)
        self.records = RunRecords(state_dir)
        mirrors = self.replica_door.mirrors
        self.lending = Lending(self.admission, mirrors, self.runs, self.records)
        self.site = Site(self.admission, self.runs, PastRuns(self.config, self.runs))

    async def serve(self, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        host, port = host_port(self.config.proxy.listen)
        self._listeners = await _listen(host, port)
        bound = self._listeners[0].socket.getsockname()[1]
        certificate = self.site.health.certificate = ServerCertificate(self.config)
        seats = take_seats(self.config, self.runs, dict(os.environ))
        task_status.started(f"{host}:{bound}")

        def shown() -> str:
            return proxy_snapshot.text(self.runs.values())

        with dumps.section("runs", shown):
            async with trio.open_nursery() as nursery:
                for seat in seats:
                    nursery.start_soon(seat.serve)
                nursery.start_soon(self._watch_progress)
                nursery.start_soon(self.admission.watch)
                nursery.start_soon(AlertDesk(self.config.alerts, self.runs).serve)
                nursery.start_soon(DrainDesk(self.config.state_dir, self.runs).serve)
                nursery.start_soon(self.replica_door.names.keep)
                nursery.start_soon(self.usage.keep, self.runs)
                nursery.start_soon(certificate.keep)
                nursery.start_soon(self.site.past.serve)
                await serve_links(
                    self._listeners,
                    certificate.context,
                    self._serve_link,
                    on_refusal=self.admission.record_refusal,
                )

    async def leave(self) -> None:
        """Say goodbye on every link, so that nobody takes the end for a loss.

        Rollouts without an answer are not waited for: they may take minutes, and the trainer's
        agent sends them again when a proxy is back. Trainers go first, so that nothing is tried
        elsewhere when the replicas go.
        """
        self.site.health.is_stopping = True
        for listener in self._listeners:
            await listener.aclose()
        await self.usage.save(self.runs)
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
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(visitor.reader.leave_when_idle)
                    await link.run(visitor.serve_stream)
                    nursery.cancel_scope.cancel()
            except* LinkError:
                if not visitor.viewer.is_known:
                    raise
                log.info("viewer.left", peer=link.peer)  # browsers say no goodbye
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, _refuse_stream)
            with suppress(LinkError):  # the link itself says why it ended
                await self.replica_door.serve(link)
            await link.aclose("control stream ended")
            nursery.cancel_scope.cancel()

    # --- trainers -------------------------------------------------------------------------

    async def serve_trainer(self, link: Link, stream: LinkStream, visitor: Visitor) -> None:
        """The control stream of a trainer's agent."""
        control: ProxyChannel = ControlChannel(stream, FROM_DIALLER)
        await stream.respond(OK_RESPONSE)
        hello = await self.admission.register(link, control, "trainer")
        if hello is None:
            return
        run_ = self.runs.open(hello.run)
        attempt = self._attempt(run_, hello)
        if attempt is None:
            reason = f"attempt {hello.attempt} was superseded by {run_.attempt}"
            self.admission.record_of(link, "trainer.refused", run=run_.name, reason=reason)
            await refuse(link, control, m.Refused("permanent", reason))
            return
        older, run_.trainer = run_.trainer, None  # its messages no longer count from here on
        run_.attempt, run_.finished = attempt, ""
        if older is not None:
            await older.link.aclose(f"superseded by attempt {attempt}")
        facts = dict(run_.story.histories)
        await control.send(self.admission.accept(link, hello.name, attempt, run_.live, facts))
        if run_.attempt != attempt:  # a third one came meanwhile
            raise LinkClosedError(f"superseded by attempt {run_.attempt}")
        run_.trainer = here = TrainerSeat(link=link, control=control)
        self.records.keep(run_.name, hello.record)
        for refused, why in proxy_engines.require(run_, _terms(hello)):
            refused.refuse(why)
        visitor.run = run_
        told = {"run": run_.name, "attempt": attempt}
        log.info("trainer.joined", **told, peer=link.peer)
        self.admission.record_of(link, "trainer.joined", **told, name=hello.name)
        run_.story.say("trainer", "info", "trainer.joined", f"The trainer joined as {attempt}")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_push_fleet, run_, control)
                nursery.start_soon(self.replica_door.mirrors.of(run_).ask, control)
                while True:
                    message = await control.receive()
                    if run_.trainer is not here:
                        raise LinkClosedError(f"superseded by attempt {run_.attempt}")
                    if isinstance(message, m.Published):
                        self._record_commit(link, run_, message)
                    await self._from_trainer(run_, control, message, nursery)
        finally:
            if run_.trainer is here:
                run_.trainer = None
            visitor.run = None
            log.info("trainer.left", **told)
            self.admission.record_of(link, "trainer.left", **told)
            run_.story.say("trainer", "info", "trainer.left", f"The trainer of {attempt} left")

    def _record_commit(self, link: Link, run_: ProxyRun, message: m.Published) -> None:
        adapter, commit = message.adapter, message.commit
        told = {"adapter": adapter.name, "digest": adapter.digest, "commit": commit}
        self.admission.record_of(link, "adapter.committed", run=run_.name, **told)

    def _attempt(self, run_: ProxyRun, hello: m.Hello) -> str | None:
        """A new attempt for a trainer that starts, its own for one that comes back."""
        highest = identity.highest_attempt(self.config.state_dir, run_.name)
        if run_.attempt:  # issued by an earlier proxy, whose state may be lost
            highest = max(highest, parse_attempt(run_.attempt).number)
        if hello.attempt:
            try:
                number = parse_attempt(hello.attempt).number
            except ValueError as error:
                raise PeerProtocolError(str(error), where=f"trainer of run {run_.name}") from error
            other = run_.attempt not in ("", hello.attempt) and number == highest
            return hello.attempt if number >= highest and not other else None
        seen = max(highest, run_.attempt_seen, hello.attempt_seen)
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
            case m.Facts():
                run_.story.take(message, proxy_snapshot.measured(run_, trio.current_time()))
            case m.Sampled(rollout=rollout):
                run_.story.sampled(rollout)
            case m.RunEnded(ok=ok, reason=reason):
                run_.charge(trio.current_time())
                run_.story.ended(reason, ok=ok)
                log.info(
                    "run.ended",
                    run=run_.name,
                    ok=ok,
                    reason=reason,
                    replica_hours=run_.usage.replica_hours,
                    unpriced_hours=run_.usage.unpriced_hours,
                    cost=run_.usage.cost,
                )
                if ok:
                    run_.finished = reason
                    await run_.tell_replicas(m.Finish(reason))
                    await self.replica_door.mirrors.of(run_).keep_newest()
            case _:
                raise PeerProtocolError(f"{type(message).__name__} from a trainer")


@dataclass(slots=True)
class Visitor:
    """One ordinary HTTP/2 connection: a trainer's agent once it has registered, the owner of a
    token that takes adapters, else a stranger."""

    proxy: Proxy
    link: Link
    run: ProxyRun | None = None
    reader: Reader = field(init=False)
    viewer: Viewer = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.proxy.lending, self.link)
        self.viewer = Viewer(self.proxy.site, self.link)

    async def serve_stream(self, stream: LinkStream) -> None:
        path = path_of(stream.request_headers)
        is_stranger = not (self.reader.is_known or self.viewer.is_known)
        if path == m.CONTROL_PATH and self.run is None and is_stranger:
            await self.proxy.serve_trainer(self.link, stream, self)
        elif path == m.ROLLOUT_PATH and self.run is not None:
            limit = self.proxy.config.proxy.queue_limit
            await serve_rollout(self.run, stream, limit)
        elif path == m.ADAPTER_PATH and self.run is not None:
            await self.proxy.replica_door.mirrors.of(self.run).receive(stream)
        elif is_asked_for(path) and self.run is None and not self.viewer.is_known:
            await self.reader.serve(stream)
        elif self.run is None and not self.reader.is_known:
            await self.viewer.serve(stream)
        else:
            await stream.respond(NOT_FOUND_RESPONSE)
            await stream.end()


def _terms(hello: m.Hello) -> Terms:
    return Terms(
        has_trainer=True,
        base_model=hello.base_model,
        model_digest=hello.model_digest,
        max_staleness=hello.max_staleness,
        allow_quantized=hello.allow_quantized,
    )


async def _close_all(links: Iterable[Carrier], reason: str) -> None:
    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(link.aclose, reason)


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
    run_.story.synced(report)
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
