"""The trainer: gives TRL, on localhost, what looks like one vLLM server, and runs it as a child.

TRL starts only when `min_replicas` engines have registered, because its own patience is 240 s and
a model load can take longer. The run is over when TRL ends: with exit code 0 the replicas are told
to go. A signal stops TRL first, so that nothing it writes is cut.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import trio

from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import AgentError, ChildNotReadyError, ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.gateway import CompletedRollout, Gateway
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.roles.registration import (
    ProxyAddresses,
    host_name,
    load_join,
    new_instance,
    stay_registered,
)
from asyncgrpo_agent.roles.trainer_adapters import Adapters
from asyncgrpo_agent.roles.trainer_job import history_file, run_job, write_job
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store import bucket
from asyncgrpo_agent.store.history import History
from asyncgrpo_agent.store.models import model_digest
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

TELL_WAITING_S: Final = 10.0
FAREWELL_S: Final = 2.0
LAST_WORD_S: Final = 60.0


def run(config: Config) -> int:
    """Train until the run ends or a signal comes. The result is the exit code."""
    return trio.run(_main, config)


async def _main(config: Config) -> int:
    join = load_join(config, "trainer")
    if join.run_private_key is None:
        raise ConfigError(
            "holds no run key, so adapters cannot be signed",
            where="link.join",
            fix="Make it on the machine where `run create` ran",
        )
    digest = await trio.to_thread.run_sync(model_digest, Path(config.model.path))
    bucket_folder = Path(config.bucket.path) / join.run
    attempts = await trio.to_thread.run_sync(bucket.list_attempts, bucket_folder)
    with History(history_file(config.state_dir, join.run)) as history:
        agent = TrainerAgent(config, join, digest, history)
        agent.link.attempt_seen = attempts[-1].number if attempts else 0
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_stop_on_signal, scope, agent)
                    await agent.run()
                    nursery.cancel_scope.cancel()
        finally:
            agent.record("ended", ok=agent.succeeded, reason=agent.outcome or "failed, see its log")
    return 0 if agent.succeeded or agent.stopping else 1


async def _stop_on_signal(scope: trio.CancelScope, agent: TrainerAgent) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            agent.stopping = True
            agent.outcome = f"stopped by {signal.Signals(number).name}"
            log.info("trainer.stopping", signal=signal.Signals(number).name)
            notifier.stopping()
            scope.cancel()


@dataclass
class TrainerAgent:
    """One start of one run's trainer; the backend of its gateway."""

    config: Config
    join: Join
    digest: str
    history: History
    stopping: bool = False
    succeeded: bool = False
    outcome: str = ""
    step: int = 0
    rollouts: int = 0
    rollouts_failed: int = 0
    _fleet: m.Fleet | None = None
    _fleet_changed: trio.Event = field(default_factory=trio.Event)
    _stepped_at: float = 0.0

    def __post_init__(self) -> None:
        instance = new_instance()
        rng = SystemRandom()
        self._rng = rng
        self.addresses = ProxyAddresses(self.config, self.join)
        self.link = TrainerLink(
            self.join,
            instance,
            host_name(self.config),
            rng,
            self._on_message,
            self._on_registered,
            self.addresses.remember,
        )
        self.adapters = Adapters(self.config, self.join, self.link, self.digest, self.record)
        self.gateway = Gateway(
            self, instance=instance, request_timeout_s=self.config.trainer.request_timeout_s
        )

    def record(self, kind: str, **fields: object) -> None:
        """Add to the run's history."""
        self.history.record(kind, time.time(), **fields)  # noqa: TID251 - a role reads the clock

    async def run(self) -> None:
        """From the first dial to the end of TRL."""
        listeners, url = await self._listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stay_registered)
            nursery.start_soon(self.adapters.retire_idle)
            await nursery.start(self._serve_gateway, listeners)
            job = write_job(self.config, self.join.run, url)
            async with trio.open_nursery() as first:
                first.start_soon(self._check_job, job)
                first.start_soon(self._wait_for_replicas)
            self.record(
                "started",
                attempt=self.link.attempt,
                run=self.join.run,
                max_steps=self.config.train.passthrough.get("max_steps"),
            )
            notifier.ready()
            try:
                await self._train(job)
                with trio.move_on_after(LAST_WORD_S):  # replicas wait for the word that it is over
                    await self.link.registered()
            except BaseException as error:
                self.outcome = self.outcome or _first_words(error)
                raise
            finally:
                with trio.move_on_after(FAREWELL_S, shield=True):
                    self._record_totals()
                    await self.link.tell(m.RunEnded(self.succeeded, self.outcome))
                    await self.link.leave(self.outcome)
            nursery.cancel_scope.cancel()

    async def _stay_registered(self) -> None:
        await stay_registered(
            self.addresses, self.join, role="trainer", serve=self._serve_link, rng=self._rng
        )

    async def _serve_link(self, link: Link) -> None:
        await self.link.serve(link)

    async def _listen(self) -> tuple[list[trio.SocketListener], str]:
        host, port = host_port(self.config.trainer.gateway)
        try:
            listeners = await trio.open_tcp_listeners(port, host=host)
        except OSError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror or error}",
                where=f"trainer.gateway {host}:{port}",
                fix="Stop the program that holds the port, or use port 0",
            ) from error
        bound = listeners[0].socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return list(listeners), f"http://{shown}:{bound}"

    async def _serve_gateway(
        self,
        listeners: list[trio.SocketListener],
        task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self.gateway.run(listeners, task_status=task_status)

    # --- before TRL -----------------------------------------------------------------------

    async def _check_job(self, job: Path) -> None:
        """Find what cannot work while vLLM is still loading. Raises ConfigError."""
        self.record("phase", phase="checking")
        await run_job(self.config, job, check=True)
        log.info("train.checked")

    async def _wait_for_replicas(self) -> None:
        wanted, limit_s = self.config.trainer.min_replicas, self.config.trainer.wait_replicas_s
        deadline = trio.current_time() + (limit_s or float("inf"))
        while True:
            ready = self._fleet.ready if self._fleet is not None else 0
            if ready >= wanted:
                log.info("replicas.ready", ready=ready)
                return
            rows = self._fleet.replicas if self._fleet is not None else []
            states = {row.name: f"{row.state}: {row.reason}" for row in rows}
            if trio.current_time() >= deadline:
                raise ChildNotReadyError(
                    f"{ready} of {wanted} replicas are ready after {limit_s:g} s",
                    where=f"run {self.join.run}",
                    fix=f"Replicas: {states or 'none has joined'}; see their logs",
                )
            log.info("replicas.awaited", ready=ready, wanted=wanted, states=states)
            await self._fleet_change(min(deadline, trio.current_time() + TELL_WAITING_S), ready)

    async def _fleet_change(self, deadline: float, ready: int) -> None:
        """Until another number of replicas is ready, or the deadline."""
        with trio.move_on_at(deadline):
            while self._fleet is None or self._fleet.ready == ready:
                await self._fleet_changed.wait()

    # --- TRL ------------------------------------------------------------------------------

    async def _train(self, job: Path) -> None:
        self._stepped_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_stall)
            await run_job(self.config, job, check=False)
            nursery.cancel_scope.cancel()
        self.succeeded, self.outcome = True, "training finished"

    async def _watch_stall(self) -> None:
        """No step for `stall_s` while replicas are ready means that TRL hangs."""
        limit_s = self.config.trainer.stall_s
        if not limit_s:
            return
        while True:
            await trio.sleep(min(limit_s, 5.0))
            if self._fleet is None or self._fleet.ready == 0:
                self._stepped_at = trio.current_time()
            quiet_s = trio.current_time() - self._stepped_at
            if quiet_s >= limit_s:
                raise ChildNotReadyError(
                    f"no training step for {quiet_s:.0f} s at step {self.step}",
                    where=f"run {self.join.run}",
                    fix="See train.log; trainer.stall_s sets the limit",
                )

    # --- what the proxy says ----------------------------------------------------------------

    async def _on_registered(self) -> None:
        await self.adapters.tell_again()

    def _on_message(self, message: m.FromAcceptor) -> None:
        match message:
            case m.Fleet():
                self._take_fleet(message)
            case m.SyncReport():
                self.adapters.reported(message)
            case m.ReplicaAck(replica=replica, ack=ack, since_announced_s=seconds):
                self.record(
                    "ack",
                    replica=replica,
                    adapter=ack.adapter.name,
                    ok=ack.ok,
                    reason=ack.reason,
                    phases_s=ack.phases_s,
                    seconds=seconds,
                )
            case _:
                log.debug("message.ignored", message=type(message).__name__)

    def _take_fleet(self, fleet: m.Fleet) -> None:
        before = {row.name: row.state for row in self._fleet.replicas} if self._fleet else {}
        for row in fleet.replicas:
            if before.pop(row.name, "") != row.state:
                self.record("replica", name=row.name, state=row.state, reason=row.reason)
        for name in before:
            self.record("replica", name=name, state="GONE", reason="its link ended")
        self._fleet = fleet
        self._fleet_changed.set()
        self._fleet_changed = trio.Event()

    def _record_totals(self) -> None:
        fleet = self._fleet
        self.record(
            "totals",
            rollouts=self.rollouts,
            rollouts_failed=self.rollouts_failed,
            resent=self.link.resent,
            retried=fleet.retried if fleet else 0,
            routed=fleet.routed if fleet else {},
            held_s=fleet.held_s if fleet else 0.0,
            replicas=[
                {
                    "name": r.name,
                    "requests": r.requests,
                    "failures": r.failures,
                    "paused_s": r.paused_s,
                }
                for r in (fleet.replicas if fleet else [])
            ],
        )

    # --- the gateway's backend --------------------------------------------------------------

    def fleet(self) -> m.Fleet | None:
        return self._fleet

    def base_model(self) -> str:
        return self.config.model_name

    def physical_name(self, trl_name: str) -> str | None:
        return self.adapters.physical_name(trl_name)

    async def publish(self, trl_name: str, local_path: str) -> None:
        await self.adapters.publish(trl_name, local_path)

    async def retire(self, trl_name: str) -> None:
        self.adapters.retire(trl_name)

    async def complete(self, rollout: m.Rollout, body: bytes) -> CompletedRollout:
        self.adapters.begin(rollout.model)
        try:
            answer = await self.link.complete(rollout, body)
        finally:
            self.adapters.finish(rollout.model)
        self.rollouts += 1
        if answer.status != 200:
            self.rollouts_failed += 1
            log.warning(
                "rollout.failed",
                rollout=rollout.id,
                status=answer.status,
                answer=answer.body[:300].decode("utf-8", "replace"),
            )
        return answer

    def observe(self, event: dict[str, Any]) -> None:
        """The engine-side child reports metrics, phases and evaluations."""
        kind = str(event.get("kind", ""))
        self._stepped_at = trio.current_time()
        if kind == "metrics":
            self.step = int(event.get("step", self.step))
            notifier.status(f"step {self.step}")
        fields = {key: value for key, value in event.items() if key not in ("kind", "t")}
        self.record(kind, **fields)
        if kind == "phase":
            log.info("train.phase", phase=event.get("phase"))


def _first_words(error: BaseException) -> str:
    """What the replicas and the history are told of an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.what if isinstance(error, AgentError) else type(error).__name__
