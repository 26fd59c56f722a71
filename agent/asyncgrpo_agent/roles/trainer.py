"""The trainer: gives TRL, on localhost, what looks like one vLLM server, and runs it as a child.

A process may start TRL more than once, each as an attempt of its own (see `trainer_agent`). A
signal stops TRL first, so that nothing it writes is cut; while none runs, it ends all at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from random import SystemRandom

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs.notice import noticed
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted, check_writable
from asyncgrpo_agent.roles.registration import (
    load_join,
)
from asyncgrpo_agent.roles.telemetry import Source, served
from asyncgrpo_agent.roles.trainer_agent import TrainerAgent, add_to
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.roles.trainer_lives import LifeFailedError, Lives, failure_of_trl
from asyncgrpo_agent.roles.trainer_metrics import TrainerView
from asyncgrpo_agent.roles.trainer_model import TrainerModel, model_of_trainer
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.history import History

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)


def run(config: Config) -> int:
    """Train until the run ends or a signal comes. The result is the exit code."""
    return trio.run(train, config)


async def train(config: Config, *others: Source) -> int:
    """The same within a loop that runs already; `others` are told of beside it."""
    notifier.watch_loop()
    code = 0
    async with trio.open_nursery() as nursery:
        await nursery.start(_end_on_signal, nursery.cancel_scope)
        code = await _train(config, others)
        nursery.cancel_scope.cancel()
    return code


async def _train(config: Config, others: Sequence[Source]) -> int:
    join = load_join(config, "trainer")
    if join.run_private_key is None:
        raise ConfigError(
            f"the join line lacks the private key of run {join.run!r}, which signs adapters",
            where="link.join",
            fix=f"On the machine where `asyncgrpo-agent run create {join.run}` ran, complete it:"
            " asyncgrpo-agent join add-key FILE --output trainer.join; start with that file here",
        )
    model = await model_of_trainer(config, join, _tell)
    config = model.config
    host = BucketHost(config.bucket.path, join.run, config.agent)
    view = TrainerView(join.run)
    telemetry = served(config.telemetry, view.source, *others)
    async with telemetry, bucket_mounted(config), host.running() as bucket:
        check_writable(config, await bucket.mount())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_notice, config)
            code = await _run_lives(model, join, bucket, view)
            nursery.cancel_scope.cancel()
        return code


async def _end_on_signal(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Hears signals while no life does: while the model is loaded, or the bucket is mounted."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            _say_stopping(number)
            scope.cancel()


def _say_stopping(number: int) -> None:
    log.info("trainer.stopping", signal=signal.Signals(number).name)
    notifier.stopping()


def _tell(reason: str) -> None:
    log.info("trainer.waiting", reason=reason)
    notifier.status(reason)


async def _end_on_notice(config: Config) -> None:
    """As by SIGTERM, whatever the trainer is doing just now."""
    await noticed(config.trainer.notice_command, config.trainer.notice_every_s)
    log.info("trainer.noticed", reason="the platform gives notice (trainer.notice_command)")
    signal.raise_signal(signal.SIGTERM)


async def _run_lives(model: TrainerModel, join: Join, bucket: BucketHost, view: TrainerView) -> int:
    config = model.config
    with History(history_file(config.state_dir, join.run)) as history:

        def tell(reason: str, delay_s: float) -> None:
            view.counts.restarts += 1
            add_to(history, "restarting", reason=reason, in_s=delay_s)

        lives = Lives(config.trainer.restarts, SystemRandom(), tell)

        async def live() -> int:
            agent = TrainerAgent(
                *(config, join, model.digest, history, bucket, lives.goes_on_after),
                run_record=model.record,
            )
            with view.showing(agent):
                return await _run_agent(agent)

        return await lives.run(live)


async def _run_agent(agent: TrainerAgent) -> int:
    """One life. Raises LifeFailedError if TRL ended it."""
    attempts = await agent.bucket.list_attempts()
    agent.link.attempt_seen = attempts[-1].number if attempts else 0
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on_signal, scope, agent)
                await agent.run()
                nursery.cancel_scope.cancel()
    except BaseException as error:
        if failure_of_trl(error) is None or agent.stopping:
            raise
        raise LifeFailedError(agent.failure(), error) from error
    finally:
        agent.record("ended", ok=agent.succeeded, reason=agent.outcome or "failed, see its log")
        await agent.history_mirror.finish(agent.config.trainer.mirror_s)
    return 0 if agent.succeeded or agent.stopping else 1


async def _stop_on_signal(scope: trio.CancelScope, agent: TrainerAgent) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            agent.stopping = True
            agent.outcome = f"stopped by {signal.Signals(number).name}"
            _say_stopping(number)
            if agent.is_training and not agent.training.cancel_called:
                agent.training.cancel()  # what TRL waits for goes on until it has saved
            else:
                scope.cancel()
