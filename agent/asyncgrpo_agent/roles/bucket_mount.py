"""The bucket's mount, for `[bucket] url`: mount-s3 started, watched, restarted, and undone.

The mount table says whether it is there. The mount itself is touched only to tell a dead left-over
from a live stranger, before anything is started. What a death leaves in the table answers ENOTCONN,
which says what is wrong, and so stays until the next start: the bare folder beneath it would look
like an empty bucket.

Before the first mount a cause that only a person can cure ends the agent with its name. Anything
else, and everything later, is tried again for ever and told each time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Final

import trio

from asyncgrpo_agent.config.s3 import s3_address
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.children import how_it_ended
from asyncgrpo_agent.core.mountpoint import (
    SOURCE,
    MountCommand,
    MountFailure,
    MountSpec,
    explain,
    mount_command,
    redacted,
    shown,
)
from asyncgrpo_agent.errors import ChildError, ConfigError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child, mount_s3
from asyncgrpo_agent.procs.look import mode_of
from asyncgrpo_agent.procs.output import KEPT_LINES
from asyncgrpo_agent.sdnotify import Notifier
from asyncgrpo_agent.store.mounts import DEAD_ERRNOS, Mount, mounted_at

log = Log(__name__)

MOUNTED_S: Final = 40.0  # mount-s3 itself gives its background start 30 s
LEFTOVER_S: Final = 15.0  # the guard of a killed agent gives its daemon 10 s to unmount
ANSWER_S: Final = 5.0
LOOK_EVERY_S: Final = 0.05
WATCH_EVERY_S: Final = 2.0  # for unmounts by others' hands, and mounts that vanish by themselves
STOP_S: Final = 5.0
UNDO_S: Final = 20.0
SAID_LINES: Final = 5


def mount_spec(config: Config) -> MountSpec:
    """The mount that a role needs: only a trainer writes."""
    bucket, address = config.bucket, s3_address(config.bucket.url)
    point = Path(bucket.path)
    return MountSpec(
        program=bucket.mount_s3,
        bucket=address.bucket,
        prefix=address.prefix,
        # As the mount table shows it. The last part may be a dead mount, which is not looked at.
        mount_point=str(Path(os.path.realpath(point.parent)) / point.name),
        writable=config.role == "trainer",
        allow_delete=bucket.allow_delete,
        endpoint_url=bucket.endpoint_url,
        region=bucket.region,
        force_path_style=bucket.force_path_style,
        credentials_file=bucket.credentials_file,
        profile=bucket.profile,
        ca_bundle=bucket.ca_bundle,
        upload_checksums=bucket.upload_checksums,
        memory_target_mib=bucket.memory_target_mib,
    )


@asynccontextmanager
async def bucket_mounted(config: Config) -> AsyncIterator[None]:
    """With `bucket.url`, the bucket is mounted at `bucket.path` as long as the block lasts.

    What the block raises comes out as it is. Raises ConfigError when the mount cannot be had, and
    SystemExit when a signal ends the wait for it.
    """
    if not config.bucket.url:
        yield
        return
    mount = await _prepared(config)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mount.keep)
        try:
            await _wait_for(mount)
            yield
        except BaseException as error:  # raised below, where no nursery wraps it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def check_writable(config: Config, mount: Mount | None) -> None:
    """Raises ConfigError where a trainer could publish nothing, before anybody waits for it."""
    if mount is not None and mount.read_only:
        raise ConfigError(
            f"{mount} is read-only, and a trainer writes to its bucket",
            where=f"bucket.path {config.bucket.path}",
            fix="Mount it without --read-only (ro), with credentials that may write",
        )


async def keep_mounted(config: Config) -> None:
    """The same for as long as it runs, for a role that does without the bucket until then.

    Raises ConfigError when the mount cannot be had.
    """
    mount = await _prepared(config)
    await mount.keep()
    if mount.error is not None:
        raise mount.error


async def _prepared(config: Config) -> BucketMount:
    spec = mount_spec(config)
    version = await mount_s3.installed_version(spec.program)
    command = mount_command(spec, version)
    for key in command.ignored:
        log.warning("mount.key_ignored", key=key, version=shown(version))
    log_file = config.log_dir / "mount-s3.log"
    return BucketMount(spec, command, mount_s3.environment(command), log_file)


async def _wait_for(mount: BucketMount) -> None:
    """Until the first mount. The role has no ears for signals yet, so this listens to them."""
    ended_by: int | None = None
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                nonlocal ended_by
                async for number in signals:
                    ended_by = number
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            await mount.decided.wait()
            nursery.cancel_scope.cancel()
    if ended_by is not None:
        log.info("mount.wait_ended", signal=signal.Signals(ended_by).name)
        raise SystemExit(0)
    if mount.error is not None:
        raise mount.error


@dataclass
class BucketMount:
    """One mount point and the daemons that serve it, one after another."""

    spec: MountSpec
    command: MountCommand
    env: dict[str, str]
    log_file: Path
    decided: trio.Event = field(default_factory=trio.Event)
    error: ConfigError | None = None
    """Why there will be no mount, once `decided`."""
    _is_up: bool = False
    _was_up: bool = False

    def __post_init__(self) -> None:
        self._point = Path(self.spec.mount_point)
        self._secrets = mount_s3.secrets(self.spec, self.env)
        self._backoff = Backoff(SystemRandom())
        self._notifier = Notifier.from_environment(os.environ)

    async def keep(self) -> None:
        """Mount, and mount again, for ever; without a first mount, until it is hopeless."""
        try:
            while (failure := await self._once()) is not None:
                delay_s = self._backoff.next_delay_s()
                self._tell(failure, delay_s)
                await trio.sleep(delay_s)
        finally:
            with trio.move_on_after(UNDO_S, shield=True):
                await self._tidy_up()

    async def _once(self) -> MountFailure | None:
        """One life of the daemon and how it ended; None when no other can be better."""
        try:
            await self._free_mount_point()
            failure = await self._live()
        except ChildError as error:
            failure = MountFailure(permanent=False, what=error.what, where=error.where)
        except ConfigError as error:
            failure = MountFailure(
                permanent=True, what=error.what, where=error.where, fix=error.fix
            )
        if self._is_up:
            self._is_up = False
            self._backoff.lost(trio.current_time())
        if not failure.permanent or self._was_up:
            return failure
        what = f"{failure.what}: {self._safe(failure.said)}" if failure.said else failure.what
        self.error = ConfigError(what, where=failure.where, fix=failure.fix)
        self.decided.set()
        return None

    # --- one life of the daemon -----------------------------------------------------------

    async def _live(self) -> MountFailure:
        async with child.started(
            "mount-s3", self.command.argv, env=self.env, log_file=self.log_file, grace_s=STOP_S
        ) as process:
            try:
                why = await self._watch(process)
            finally:
                with trio.move_on_after(UNDO_S, shield=True):
                    await self._unmount(process)
        assert process.returncode is not None, "it has been stopped"
        if why:
            return MountFailure(permanent=False, what=why, said=process.tail(SAID_LINES))
        if self._is_up:  # its lines are of many days, and need not be about its end
            what = f"mount-s3 ended: {how_it_ended(process.returncode)}"
            return MountFailure(permanent=False, what=what, said=process.tail(SAID_LINES))
        return explain(process.tail(KEPT_LINES), process.returncode, self.spec)

    async def _watch(self, process: child.Child) -> str:
        """Until the mount or its daemon is gone. What is wrong, if the daemon still runs."""
        if await _comes_true(process, self._is_mounted, LOOK_EVERY_S, MOUNTED_S):
            self._up()
            if await _comes_true(process, lambda: not self._is_mounted(), WATCH_EVERY_S):
                return "the mount has vanished while its daemon runs"
        elif process.returncode is None:
            return f"nothing is mounted after {MOUNTED_S:g} s"
        return ""

    def _is_mounted(self) -> bool:
        return mounted_at(self._point) is not None

    def _up(self) -> None:
        self._is_up = self._was_up = True
        self._backoff.connected(trio.current_time())
        log.info(
            "mount.up",
            at=self._point,
            bucket=self.spec.bucket,
            prefix=self.spec.prefix,
            writable=self.spec.writable,
        )
        self.decided.set()

    async def _unmount(self, process: child.Child) -> None:
        """In good order; the daemon ends by itself then."""
        if process.returncode is None and self._is_mounted():
            said = await mount_s3.unmount(str(self._point), lazily=False)
            if said:  # in use; the daemon is stopped next, and the rest removed after it
                log.info("mount.busy", at=self._point, said=said)
            else:
                with trio.move_on_after(STOP_S):
                    await process.wait()

    # --- the mount point ------------------------------------------------------------------

    async def _free_mount_point(self) -> None:
        """Remove what a death has left there. Raises ConfigError for anything else."""
        deadline = trio.current_time() + LEFTOVER_S
        while (found := mounted_at(self._point)) is not None:
            if found.source != SOURCE:
                fix = "Unmount it, or choose another folder"
                raise ConfigError(f"{found} is there already", where="bucket.path", fix=fix)
            if await self._remove_dead():
                continue
            if trio.current_time() > deadline:
                raise ConfigError(
                    f"another mount-s3 is alive on {self._point}",
                    where="bucket.path",
                    fix="End it, or give each agent a folder, and a state folder, of its own",
                )
            await trio.sleep(LOOK_EVERY_S)  # the daemon of a killed agent may be on its way out
        try:
            self._point.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            what = f"{self._point} cannot be made: {error.strerror}"
            raise ConfigError(what, where="bucket.path", fix="Choose another folder") from error

    async def _remove_dead(self) -> bool:
        """Whether a dead mount was there, and is not any more."""
        if not await self._is_dead():
            return False
        said = await mount_s3.unmount(str(self._point), lazily=True)
        if said and self._is_mounted():
            fix = f"Run `umount -l {self._point}` as root"
            raise ConfigError(f"a dead mount does not go: {said}", where="bucket.path", fix=fix)
        log.info("mount.cleared", at=self._point)
        return True

    async def _is_dead(self) -> bool:
        look = partial(mode_of, str(self._point), ANSWER_S)
        try:
            mode = await trio.to_thread.run_sync(look, abandon_on_cancel=True)
        except OSError as error:
            return error.errno in DEAD_ERRNOS
        if mode is not None:
            return False
        raise ConfigError(
            f"the mount on {self._point} does not answer",
            where="bucket.path",
            fix="End its daemon, then unmount it with `umount -l`",
        )

    async def _tidy_up(self) -> None:
        found = mounted_at(self._point)
        if self._was_up and found is not None and found.source == SOURCE:
            try:
                await self._remove_dead()
            except ConfigError as error:
                log.error("mount.left", reason=str(error))

    # --- telling --------------------------------------------------------------------------

    def _tell(self, failure: MountFailure, delay_s: float) -> None:
        event = "mount.lost" if self._was_up else "mount.failed"
        log.warning(
            event,
            what=failure.what,
            where=failure.where,
            fix=failure.fix,
            said=self._safe(failure.said),
            log=self.log_file,
            in_s=delay_s,
        )
        self._notifier.status(f"no bucket: {failure.what}")

    def _safe(self, text: str) -> str:
        return redacted(text, self._secrets)


async def _comes_true(
    process: child.Child, is_so: Callable[[], bool], every_s: float, limit_s: float = float("inf")
) -> bool:
    """Look again and again; False when the process has ended or the time is up."""
    deadline = trio.current_time() + limit_s
    while not is_so():
        with trio.move_on_after(every_s):
            await process.wait()
            return False
        if trio.current_time() >= deadline:
            return False
    return True
