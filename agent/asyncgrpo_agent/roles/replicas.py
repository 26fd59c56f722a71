"""Several replicas on one host, in one command: an agent for each, and this one around them.

Each has its own link, socket, engine and state folder, so that one that fails takes no other along.
Signals and the platform's notice are passed on to all, and what concerns the host as a whole is
done here: mounting its bucket, its command on exit, its price. With one replica none of this is
needed, and this process is that replica.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio

from asyncgrpo_agent.config.sections import Bucket, Config, Telemetry, host_port
from asyncgrpo_agent.core.gpu_groups import gpu_groups
from asyncgrpo_agent.errors import EXIT_CONFIG, ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child, vllm
from asyncgrpo_agent.procs.gpus import gpus_of_host
from asyncgrpo_agent.procs.notice import noticed
from asyncgrpo_agent.procs.socket_dirs import socket_dir
from asyncgrpo_agent.roles import replica
from asyncgrpo_agent.roles.agent_children import agent_started, share_of_cores, write_config
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted
from asyncgrpo_agent.roles.registration import host_name, load_join
from asyncgrpo_agent.roles.replica_engine import STOP_VLLM_S
from asyncgrpo_agent.roles.replica_exit import call_on_exit
from asyncgrpo_agent.sdnotify import Notifier, NotifySocket

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

REST_S: Final = 15.0  # beside rollouts and vLLM, before a replica is killed


def run(config: Config) -> int:
    """Serve until the run ends or a signal comes. The result is the worst exit code of all."""
    configs = replicas_of(config)
    return replica.run(configs[0]) if len(configs) == 1 else trio.run(_main, config, configs)


def replicas_of(config: Config) -> list[Config]:
    """The configuration of each replica of this host. Raises ConfigError."""
    wanted = config.replica
    gpus = wanted.gpus.split(",") if wanted.gpus else []
    if not gpus and wanted.replicas != 1:
        gpus = gpus_of_host()
    try:
        groups = gpu_groups(gpus, wanted.replicas, vllm.gpus_per_engine(config.engine.args))
    except ValueError as error:
        raise ConfigError(
            str(error),
            where="replica.replicas",
            fix="Give --gpus, --replicas and --tensor-parallel-size that fit each other",
        ) from error
    if len(groups) == 1:
        return [_one_of(config, gpus=groups[0], replicas=1)]
    return [_member(config, number, group, groups) for number, group in enumerate(groups, 1)]


def _member(config: Config, number: int, gpus: str, groups: list[str]) -> Config:
    """One of several. What concerns the host as a whole is left to the process around them."""
    base = config.replica.name or host_name(config)
    own = _one_of(
        config,
        gpus=gpus,
        replicas=1,
        name=base if gpus else f"{base}-{number}",
        price_per_hour=config.replica.price_per_hour / len(groups),
        on_exit_command=[],
        notice_command=[],
    )
    state = config.state_dir / f"replica-{gpus.replace(',', '-').replace('/', '-') or number}"
    log_dir = str(config.log_dir)
    agent = msgspec.structs.replace(config.agent, state_dir=str(state), log_dir=log_dir)
    env = config.engine.env if gpus else share_of_cores(config, len(groups))
    return dataclasses.replace(
        own,
        agent=agent,
        engine=msgspec.structs.replace(config.engine, env=env),
        bucket=_shared(config),
        telemetry=_telemetry(config, number),
    )


def _one_of(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, replica=msgspec.structs.replace(config.replica, **changes))


def _shared(config: Config) -> Bucket:
    """The host's one mount as a folder; a mirror of the link is each replica's own."""
    bucket = config.bucket
    if bucket.source == "link":
        return msgspec.structs.replace(bucket, path="")
    return Bucket(path=bucket.path) if bucket.url else bucket


def _telemetry(config: Config, number: int) -> Telemetry:
    """Each on a port of its own, the first on the one that is configured."""
    listen = config.telemetry.listen
    if not listen or (port := host_port(listen)[1]) == 0:
        return config.telemetry
    address = f"{listen.rpartition(':')[0]}:{port + number - 1}"
    return msgspec.structs.replace(config.telemetry, listen=address)


async def _main(config: Config, configs: list[Config]) -> int:
    notifier.watch_loop()
    join = load_join(config, "replica")
    group = ReplicaGroup(config, configs)
    log.info("replicas.starting", run=join.run, names=", ".join(map(host_name, configs)))
    async with bucket_mounted(config):
        await group.run()
    if not group.signalled:
        await call_on_exit(config.replica.on_exit_command)
    return group.exit_code


@dataclass
class ReplicaGroup:
    """The replicas of one host. `exit_code` is the worst of theirs, once they have ended."""

    config: Config
    configs: list[Config]
    signalled: bool = False
    exit_code: int = 0
    _children: dict[str, child.Child] = field(default_factory=dict)
    _status: dict[str, str] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Until the last has ended."""
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            sockets = stack.enter_context(socket_dir())
            nursery.start_soon(self._pass_signals_on)
            nursery.start_soon(self._pass_notice_on)
            for config in self.configs:
                name = host_name(config)
                told = NotifySocket(sockets / f"{len(self._children)}.sock")
                stack.callback(told.close)
                nursery.start_soon(self._listen, name, told)
                self._children[name] = await stack.enter_async_context(
                    self._started(name, config, told.address)
                )
                self._status[name] = "starting"
            async with trio.open_nursery() as waiting:
                for name, process in self._children.items():
                    waiting.start_soon(self._await_end, name, process)
            nursery.cancel_scope.cancel()

    def _started(
        self, name: str, config: Config, told: str
    ) -> AbstractAsyncContextManager[child.Child]:
        return agent_started(
            name,
            "replica",
            write_config(config, config.state_dir),
            log_file=config.log_dir / f"{name}.log",
            grace_s=config.replica.drain_s + STOP_VLLM_S + REST_S,
            additions={"NOTIFY_SOCKET": told, "ASYNCGRPO_JOIN": config.join_line},
            on_line=self._writer(name),
        )

    def _writer(self, name: str) -> Callable[[str], None]:
        """JSON lines stay what they are."""
        prefix = "" if self.config.agent.log_json else f"[{name}] "

        def write(line: str) -> None:
            sys.stderr.write(f"{prefix}{line}\n")

        return write

    async def _await_end(self, name: str, process: child.Child) -> None:
        code = await process.wait()
        self.exit_code = worst_of(self.exit_code, code)
        del self._status[name]
        left = len(self._status)
        note = log.info if code == 0 else log.error
        note("replica.ended", replica=name, code=code, others=left)
        self._tell()

    # --- passing on -----------------------------------------------------------------------

    async def _pass_signals_on(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self._end(signal.Signals(number).name)

    async def _pass_notice_on(self) -> None:
        await noticed(self.config.replica.notice_command, self.config.replica.notice_every_s)
        self._end("the platform's notice")

    def _end(self, reason: str) -> None:
        """All drain; a second time they hurry."""
        self.signalled = True
        notifier.stopping()
        log.info("replicas.stopping", reason=reason)
        for process in self._children.values():
            process.send_signal(signal.SIGTERM)

    async def _listen(self, name: str, told: NotifySocket) -> None:
        """What a replica would tell systemd; ready are they when all that run are."""
        async for message in told:
            if "READY=1" in message:
                self._ready.add(name)
            for line in message:
                if line.startswith("STATUS=") and name in self._status:
                    self._status[name] = line.removeprefix("STATUS=")
            self._tell()

    def _tell(self) -> None:
        if self._status and self._ready.issuperset(self._status):
            notifier.ready()
        notifier.status("; ".join(f"{name}: {text}" for name, text in self._status.items()))


def worst_of(before: int, code: int) -> int:
    """Of two exit codes. 78 is the worst: a restart of the whole would not help; death by a signal
    is a failure."""
    code = 1 if code < 0 else code
    return EXIT_CONFIG if EXIT_CONFIG in (before, code) else max(before, code)
