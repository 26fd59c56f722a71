"""One start of a run's trainer: its gateway, its link, its syncs, and TRL from check to end.

TRL starts only when `min_replicas` engines have registered, because its own patience is 240 s and
a model load can take longer. The run is over when TRL ends: with exit code 0 the replicas are told
to go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapters import parse_attempt
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.restarts import Failure
from asyncgrpo_agent.core.trainer_metrics import TrainerCounts
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.rollouts import CompletedRollout
from asyncgrpo_agent.procs.environment import secret_values
from asyncgrpo_agent.roles import trainer_origin
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.registration import (
    ProxyAddresses,
    host_name,
    new_instance,
    stay_registered,
)
from asyncgrpo_agent.roles.trainer_about import Traffic, about
from asyncgrpo_agent.roles.trainer_adapters import Adapters
from asyncgrpo_agent.roles.trainer_checkpoints import Checkpoints
from asyncgrpo_agent.roles.trainer_facts import FactsTeller
from asyncgrpo_agent.roles.trainer_fleet import FleetView
from asyncgrpo_agent.roles.trainer_gateway import GatewayDoor
from asyncgrpo_agent.roles.trainer_history import HistoryMirror
from asyncgrpo_agent.roles.trainer_job import (
    history_file,
    job_log,
    max_staleness,
    run_job,
    write_job,
)
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_lives import failure_of_trl
from asyncgrpo_agent.roles.trainer_result import RunResult
from asyncgrpo_agent.roles.trainer_resume import Resumed, Resumption, settings_of
from asyncgrpo_agent.roles.trainer_retention import Retention
from asyncgrpo_agent.roles.trainer_samples import RolloutSamples
from asyncgrpo_agent.roles.trainer_stall import StallWatch
from asyncgrpo_agent.roles.trainer_supply import Supplier
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.history import History
from asyncgrpo_agent.wire import messages as m

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

FAREWELL_S: Final = 2.0
LAST_WORD_S: Final = 60.0


@dataclass
class TrainerAgent:
    """One start of one run's trainer; the backend of its gateway."""

    config: Config
    join: Join
    digest: str
    history: History
    bucket: BucketHost
    goes_on_after: Callable[[Failure], bool] = lambda _failure: False
    """Whether another start follows one that TRL ended so."""
    run_record: bytes = b""
    """What the run is, sealed, for its replicas."""
    stopping: bool = False
    succeeded: bool = False
    outcome: str = ""
    rollouts: int = 0
    rollouts_failed: int = 0
    began_at: int = 0  # step
    is_training: bool = False
    training: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of TRL alone: the gateway and the link outlive it."""
    counts: TrainerCounts = field(default_factory=TrainerCounts)

    def __post_init__(self) -> None:
        instance = new_instance()
        rng = SystemRandom()
        self._rng = rng
        self.fleet_view = FleetView(self.config, self.join.run, self.record)
        train_log = job_log(self.config, self.join.run, "train")
        self.stall = StallWatch(
            self.config.trainer.stall_s, self.join.run, self._is_held_up, train_log
        )
        self.addresses = ProxyAddresses(self.config, self.join)
        self.link = TrainerLink(
            self.join,
            instance,
            host_name(self.config),
            rng,
            self._on_message,
            self._on_registered,
            self.addresses.remember,
            max_staleness=max_staleness(self.config),
            base_model=self.config.model_name,
            model_digest=self.digest,
            allow_quantized=self.config.trainer.allow_quantized_replicas,
            record=self.run_record.decode(),
        )
        turns = Turns()
        self.supplier = Supplier(
            join=self.join,
            link=self.link,
            bucket=self.bucket,
            turns=turns,
            staging_dir=self.config.state_dir / "supply" / self.join.run,
            max_rank=self.fleet_view.max_rank,
            record=self.record,
        )
        self.adapters = Adapters(
            self.config,
            self.join,
            self.link,
            self.bucket,
            turns,
            self.digest,
            self.record,
            self.fleet_view.max_rank,
            self.supplier.published,
        )
        self.retention = Retention(
            self.config.bucket, self.adapters, self.bucket, turns, self.record
        )
        self.checkpoints = Checkpoints(
            self.config,
            self.join,
            self.link,
            self.bucket,
            turns,
            self.digest,
            self.record,
            settings_of(self.config),
        )
        self.result = RunResult(
            self.config, self.join, self.link, self.bucket, turns, self.digest, self.record, rng
        )
        path = history_file(self.config.state_dir, self.join.run)
        self.facts = FactsTeller(path, self.link)
        self.history_mirror = HistoryMirror(
            *(path, self.join.run, self.link, self.bucket, turns),
            secrets=secret_values({**os.environ, **self.config.engine.env}),
        )
        self.traffic = Traffic(self.fleet_view)
        self.samples = RolloutSamples(self.config.trainer.sample_rollouts, self.link.tell_sample)
        self.resumption = Resumption(self.config, self.join, self.bucket, self.digest)
        self.door = GatewayDoor(self.config.trainer, self, instance)

    def record(self, kind: str, **fields: object) -> None:
        add_to(self.history, kind, **fields)
        self.counts.add(kind, fields, time.time())  # noqa: TID251 - a role reads the clock
        self.facts.wake()

    def failure(self) -> Failure:
        """How far this life came."""
        return Failure(began_at=self.began_at, step=self.stall.step)

    async def run(self) -> None:
        """From the first dial to the end of TRL."""
        url = await self.door.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stay_registered)
            nursery.start_soon(self.adapters.retire_idle)
            nursery.start_soon(self.supplier.run)
            nursery.start_soon(self.facts.run)
            nursery.start_soon(self.history_mirror.run)
            nursery.start_soon(self.samples.run)
            nursery.start_soon(self.retention.run)
            resumed = await self._resume()
            nursery.start_soon(self.checkpoints.run)
            await nursery.start(self.door.serve)
            goes_on = False
            try:
                if not resumed.finished:
                    await self._begin(url, resumed)
                if self.succeeded:
                    await self.result.publish()
                    # Replicas wait for the word that it is over.
                    with trio.move_on_after(LAST_WORD_S):
                        await self.link.registered()
            except BaseException as error:
                self.outcome = self.outcome or _first_words(error)
                goes_on = self._goes_on(error)
                raise
            finally:
                with trio.move_on_after(FAREWELL_S, shield=True):
                    self._record_totals()
                    if not goes_on:
                        await self.link.tell(m.RunEnded(self.succeeded, self.outcome))
                    await self.facts.flush()
                    await self.link.leave(self.outcome)
                await self.checkpoints.finish()
            if self.succeeded:
                await self.retention.last_round()
            nursery.cancel_scope.cancel()

    def _goes_on(self, error: BaseException) -> bool:
        """Then this was the end of an attempt, not of the run."""
        is_trl = failure_of_trl(error) is not None and not self.stopping
        return is_trl and self.goes_on_after(self.failure())

    async def _resume(self) -> Resumed:
        """Where this attempt goes on."""
        resumed = await self.resumption.prepare()
        self.checkpoints.leave_earlier_ones(but=None if resumed.is_mirrored else resumed.step)
        self.began_at = self.stall.step = self.result.step = resumed.step
        if resumed.folder is not None:
            self.record(
                "resumed",
                step=resumed.step,
                source=resumed.source,
                finished=resumed.finished,
            )
        if resumed.finished:
            self.succeeded, self.outcome = True, f"training had ended at step {resumed.step}"
            notifier.ready()  # an end before it counts as a failure
            log.info("run.finished", step=resumed.step, fix="To go on, raise train.max_steps")
        return resumed

    async def _origin(self) -> Path | None:
        """The adapter that a new run begins with, if it is to begin with any."""
        found = await trainer_origin.bring(self.config, self.join.run, self.digest)
        if found is None:
            return None
        self.record("origin", adapter=found.name, run=found.run, digest=found.digest)
        log.info("run.begins_with", adapter=found.name)
        return found.folder

    async def _begin(self, url: str, resumed: Resumed) -> None:
        """From the checks to the end of TRL."""
        origin = None if resumed.folder is not None else await self._origin()
        job = write_job(self.config, self.join.run, url, resumed.folder, origin)
        async with trio.open_nursery() as first:
            first.start_soon(self._check_job, job)
            first.start_soon(self.fleet_view.wait_for_replicas)
        await self.resumption.note_start(parse_attempt(self.link.attempt).number)
        self.record("about", **about(self.config, self.join.run, self.digest, self.fleet_view))
        self.record(
            "started",
            attempt=self.link.attempt,
            run=self.join.run,
            max_steps=self.config.train.passthrough.get("max_steps"),
        )
        notifier.ready()
        await self._train(job)

    async def _stay_registered(self) -> None:
        try:
            await stay_registered(
                self.addresses, self.join, role="trainer", serve=self._serve_link, rng=self._rng
            )
        except AgentError as error:
            self.outcome = error.what
            raise

    async def _serve_link(self, link: Link) -> None:
        await self.link.serve(link)

    # --- before TRL -----------------------------------------------------------------------

    async def _check_job(self, job: Path) -> None:
        """Find what cannot work while vLLM is still loading. Raises ConfigError."""
        self.record("phase", phase="checking")
        await run_job(self.config, job, check=True, secrets=[self.door.token])
        log.info("train.checked")

    # --- TRL ------------------------------------------------------------------------------

    async def _train(self, job: Path) -> None:
        self.stall.heard()
        self.is_training = True
        with self.training:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.stall.watch)
                await run_job(self.config, job, check=False, secrets=[self.door.token])
                nursery.cancel_scope.cancel()
            self.succeeded, self.outcome = True, "training finished"
        self.is_training = False

    def _is_held_up(self) -> bool:
        return self.fleet_view.ready == 0 or self.adapters.is_unwritten

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
            case m.Supply(names=names):
                self.supplier.asked([name for name in names if name in self.adapters.live])
            case _:
                log.debug("message.ignored", message=type(message).__name__)

    def _take_fleet(self, fleet: m.Fleet) -> None:
        self.fleet_view.take(fleet)
        self.supplier.link_sources = fleet.link_sources

    def _record_totals(self) -> None:
        self.record(
            "totals",
            rollouts=self.rollouts,
            rollouts_failed=self.rollouts_failed,
            resent=self.link.resent,
            **self.fleet_view.totals(),
        )

    # --- the gateway's backend --------------------------------------------------------------

    def fleet(self) -> m.Fleet | None:
        return self.fleet_view.now

    def base_model(self) -> str:
        return self.link.base_model

    def physical_name(self, trl_name: str) -> str | None:
        return self.adapters.physical_name(trl_name)

    async def publish(self, trl_name: str, local_path: str) -> None:
        await self.adapters.publish(trl_name, local_path)

    async def retire(self, trl_name: str) -> None:
        self.adapters.retire(trl_name)

    async def complete(self, rollout: m.Rollout, body: bytes) -> CompletedRollout:
        self.adapters.begin(rollout.model, is_evaluated=rollout.is_low)
        began = trio.current_time()
        try:
            answer = await self.link.complete(rollout, body)
        finally:
            self.adapters.finish(rollout.model)
        self.rollouts += 1
        self.counts.answer(ok=answer.status == 200)
        self.samples.answered(rollout, answer, trio.current_time() - began)
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
        self.stall.heard()
        if kind == "sample":  # people's words are kept nowhere
            self.samples.scored(event)
            return
        if kind == "metrics":
            step = int(event.get("step", self.stall.step))
            self.stall.step = self.checkpoints.trl_step = step
            notifier.status(f"step {step}")
        elif kind == "saved":
            self.result.step = int(event.get("step", self.stall.step))
        fields = {key: value for key, value in event.items() if key not in ("kind", "t")}
        self.record(kind, **fields)
        if kind == "metrics" and (traffic := self.traffic.sample()) is not None:
            self.record("traffic", step=self.stall.step, **traffic)
        if kind == "phase":
            log.info("train.phase", phase=event.get("phase"))


def add_to(history: History, kind: str, **fields: object) -> None:
    """The run does not depend on its history."""
    try:
        history.record(kind, time.time(), **fields)  # noqa: TID251 - a role reads the clock
    except OSError as error:
        log.warning("history.unwritten", kind=kind, error=error.strerror)


def _first_words(error: BaseException) -> str:
    """What the replicas and the history are told of an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.what if isinstance(error, AgentError) else type(error).__name__
