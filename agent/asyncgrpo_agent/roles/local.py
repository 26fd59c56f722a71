"""A whole fleet on one machine: the same three roles as separate processes, a folder as bucket.

Nothing here is a short cut: the children are ordinary agents with join files, TLS links and a run
key, so that what works here works across firewalls. When the run ends, in whatever way, every child
is stopped before this process ends, and then the tokens of its join files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import ChildExitedError, ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child
from asyncgrpo_agent.roles.agent_children import agent_started, share_of_cores, write_config
from asyncgrpo_agent.roles.live_view import follow
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store import identity, tokens

log = Log(__name__)
notifier = Notifier.from_environment(os.environ)

LOOPBACK: Final = "127.0.0.1"
STOP_S: Final = 90.0  # the trainer may have a checkpoint to save first
FAREWELL_S: Final = 20.0  # replicas drain after the run has finished
EXIT_INTERRUPTED: Final = 130


def run(config: Config) -> int:
    """Run the fleet to the end of the training. The result is the exit code."""
    return trio.run(_main, config)


async def _main(config: Config) -> int:
    console = Console()
    if console.is_terminal:  # the view is drawn in place; lines in between would tear it
        logging.getLogger().setLevel(logging.WARNING)
    fleet = LocalFleet(config, console)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, scope, fleet)
            await fleet.run()
            nursery.cancel_scope.cancel()
    if fleet.interrupted:
        return EXIT_INTERRUPTED if fleet.interrupted == signal.SIGINT else 0
    return fleet.exit_code


async def _stop_on_signal(scope: trio.CancelScope, fleet: LocalFleet) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            fleet.interrupted = number
            log.info("local.stopping", signal=signal.Signals(number).name)
            notifier.stopping()
            scope.cancel()


@dataclass
class LocalFleet:
    """One proxy, some replicas, one trainer."""

    config: Config
    console: Console
    interrupted: int = 0
    exit_code: int = 1
    _joins: dict[str, Path] = field(default_factory=dict)
    _tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_name = self.config.run.name or "local"
        self.folder = self.config.state_dir
        self.bucket = Path(self.config.bucket.path or self.folder / "bucket")

    async def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if "bucket.path" not in self.config.origins:  # else it is there, and may be a mount
            self.bucket.mkdir(parents=True, exist_ok=True)
        address = f"{LOOPBACK}:{_free_port()}"
        with _alone_in(self.folder):
            try:
                self._make_joins(address)
                await self._run_agents(address)
            finally:
                self._revoke_joins()

    async def _run_agents(self, address: str) -> None:
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            nursery.start_soon(follow, self._history(), self.console)
            proxy = await self._start(stack, "proxy", {"proxy": {"listen": address}})
            replicas = [
                await self._start(stack, f"replica-{number}", self._replica_table(number))
                for number in range(1, self.config.local.replicas + 1)
            ]
            trainer = await self._start(stack, "trainer", {})
            await self._until_done(trainer, [proxy, *replicas])
            await self._farewell(replicas)
            nursery.cancel_scope.cancel()

    def _history(self) -> Path:
        path = history_file(self.folder / "trainer", self.run_name)
        path.unlink(missing_ok=True)  # the view shows this start only
        return path

    # --- starting -------------------------------------------------------------------------

    def _make_joins(self, address: str) -> None:
        """Join files as an operator would make them, for agents of this machine."""
        proxy_state = self.folder / "proxy"
        identity.ensure_run(proxy_state, self.run_name)
        for role in ("replica", "trainer"):
            path = self.folder / f"{role}.join"
            self._discard_last(path)
            line = identity.create_join(
                proxy_state,
                role=role,
                run=self.run_name,
                addresses=[address],
                now_unix_s=_now_unix_s(),
            )
            path.touch(mode=0o600)
            path.chmod(0o600)
            path.write_text(line + "\n")
            self._joins[role] = path
            self._tokens.append(decode(line).token)

    def _discard_last(self, path: Path) -> None:
        """Forget the token of an earlier start, whose only copy is about to be overwritten."""
        with suppress(FileNotFoundError, ConfigError):  # ConfigError: cut when a start was killed
            token = decode(path.read_text("ascii", "replace")).token
            tokens.discard_token(self.folder / "proxy", token, now_unix_s=_now_unix_s())

    def _revoke_joins(self) -> None:
        """Nobody can join any more, for all agents have ended."""
        proxy_state, now_unix_s = self.folder / "proxy", _now_unix_s()
        try:
            for token in self._tokens:
                if (facts := tokens.find_token(proxy_state, token)) is not None:
                    tokens.revoke_token(proxy_state, facts.id, now_unix_s=now_unix_s)
        except (OSError, ConfigError) as error:  # the next start discards them
            log.warning("tokens.unrevoked", reason=str(error))

    def _replica_table(self, number: int) -> dict[str, dict[str, Any]]:
        return {
            "replica": {"name": f"replica-{number}"},
            "engine": {"env": share_of_cores(self.config, self.config.local.replicas)},
        }

    async def _start(
        self, stack: AsyncExitStack, name: str, overrides: dict[str, dict[str, Any]]
    ) -> child.Child:
        role = name.split("-")[0]
        config_file = self._write_config(name, role, overrides)
        return await stack.enter_async_context(
            agent_started(name, role, config_file, log_file=self._log_file(name), grace_s=STOP_S)
        )

    def _log_file(self, name: str) -> Path:
        return self.config.log_dir / f"{name}.log"

    def _write_config(self, name: str, role: str, overrides: dict[str, dict[str, Any]]) -> Path:
        state = self.folder / name
        log_dir = self.config.agent.log_dir
        defaults: dict[str, dict[str, Any]] = {
            "agent": {
                "state_dir": str(state),
                "log_dir": f"{log_dir}/{name}" if log_dir else "",
            },
            "run": {"name": self.run_name},
            "bucket": {"path": str(self.bucket)},
            "trainer": {"min_replicas": self.config.local.replicas},
        }
        if role != "proxy":  # which tells of the whole fleet
            defaults["telemetry"] = {"listen": ""}
        if role in self._joins:
            defaults["link"] = {"join": str(self._joins[role])}
        return write_config(self.config, state, defaults, overrides)

    # --- running --------------------------------------------------------------------------

    async def _until_done(self, trainer: child.Child, others: list[child.Child]) -> None:
        """Wait for the trainer. Raises when any of the others ends before it."""
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(self._end_early, other, others)
            code = await trainer.wait()
            nursery.cancel_scope.cancel()
        self.exit_code = code
        if code != 0:
            raise LocalChildError("trainer", trainer, self._log_file("trainer"))

    async def _end_early(self, other: child.Child, others: list[child.Child]) -> None:
        code = await other.wait()
        if code == 0:  # a replica that was told that the run is over may be first
            await trio.sleep(FAREWELL_S)
            if any(one.returncode is None for one in others if one.name != "proxy"):
                log.info("local.replica_left", child=other.name)  # drained: the others go on
                return
        log.error("local.child_ended", child=other.name, code=code)
        raise LocalChildError(other.name, other, self._log_file(other.name))

    async def _farewell(self, replicas: list[child.Child]) -> None:
        """Replicas were told that the run is over; let them leave by themselves."""
        with trio.move_on_after(FAREWELL_S):
            for replica in replicas:
                await replica.wait()


class LocalChildError(ChildExitedError):
    """A child of the local fleet ended badly; its own error is passed on with its exit code."""

    def __init__(self, name: str, process: child.Child, log_file: Path) -> None:
        code = process.returncode or 0
        lines = [line for line in process.tail().splitlines() if not line.startswith("INFO ")]
        super().__init__(
            f"{name} ended with exit code {code}: " + ("\n".join(lines[-6:]) or "no last words"),
            returncode=code,
            where=str(log_file),
        )
        self.exit_code = code if code in (1, 2, 78) else 1


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two fleets in one folder would take each other's files and tokens. Raises ConfigError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another local fleet runs in this folder",
                where=f"agent.state_dir {folder}",
                fix="Stop it, or give this one a folder of its own: --state-dir DIR",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _now_unix_s() -> float:
    return time.time()  # noqa: TID251 - a role reads the clock


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
