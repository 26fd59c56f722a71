import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.procs.program import worker_environment
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.store.bucket import PublishedAdapter
from asyncgrpo_agent.store.staging import StagedAdapter, clean
from fakes.adapters import load
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY, FakeTrainer
from fakes.processes import runs
from fakes.strict_mount import Host, StrictBucket
from fakes.strict_mount_control import Operation

PATIENCE_S = 10.0
SILENCE_S = 1.0
BACKOFF_S = 0.3
# An agent whose bucket hangs and who wants to go.
AGENT = """
import sys, trio
from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.roles.bucket_host import BucketHost
async def main():
    async with BucketHost(sys.argv[1], "run", Agent(), silence_s=0.5).running() as host:
        try:
            await host.list_attempts()
        except BucketUnavailableError:
            print(host.hung_calls()[0].pid, flush=True)
trio.run(main)
"""


@dataclass
class World:
    """A run on a bucket in a folder, and the host that looks at it."""

    folder: Path
    bucket: Path
    changes: int = 0
    _changed: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.trainer = FakeTrainer(self.folder / "local", self.bucket / "run")
        self.staging = self.folder / "staged"
        clean(self.staging)
        self.host = BucketHost(
            str(self.bucket),
            "run",
            Agent(),
            changed=self.changed,
            silence_s=SILENCE_S,
            min_backoff_s=BACKOFF_S,
        )

    def changed(self) -> None:
        self.changes += 1
        self._changed.set()
        self._changed = trio.Event()

    async def change(self) -> None:
        with trio.fail_after(PATIENCE_S):
            await self._changed.wait()

    async def publish(self, version: int) -> PublishedAdapter:
        local = self.folder / "local" / f"v{version}"
        return await self.host.publish(
            local if local.exists() else self.trainer.save(version),
            run="run",
            attempt=ATTEMPT,
            version=version,
            base_model="base",
            base_model_digest="ab" * 32,
            private_key=PRIVATE_KEY,
            live=[],
            now_unix_s=1.7e9,
            max_rank=8,
        )

    async def newest(self) -> str:
        return (await self.host.list_commits(ATTEMPT, -1))[0]

    async def staged(self) -> StagedAdapter:
        listed = await self.host.read_commit(await self.newest(), run="run", public_key=PUBLIC_KEY)
        return await self.host.stage(listed.commit, self.staging, max_rank=8)

    async def works_again(self) -> None:
        with trio.fail_after(PATIENCE_S):
            while True:
                with suppress(BucketUnavailableError):
                    await self.host.list_attempts()
                    return
                await trio.sleep(0.05)

    async def all_released(self) -> None:
        with trio.fail_after(PATIENCE_S):
            while self.host.hung_calls():  # noqa: ASYNC110 - the kernel tells nobody
                await trio.sleep(0.01)

    def pid(self) -> int:
        worker = self.host._worker
        assert worker is not None
        return worker.pid


@asynccontextmanager
async def on_folder(folder: Path) -> AsyncIterator[World]:
    (folder / "bucket").mkdir()
    world = World(folder, folder / "bucket")
    async with world.host.running():
        await world.host.mount()
        yield world


@asynccontextmanager
async def on_mount(folder: Path) -> AsyncIterator[tuple[World, Host]]:
    """The world of a mount that its trainer can write to."""
    with StrictBucket(folder).mount("host", allow_delete=True) as mounted:
        world = World(folder, mounted.path)
        async with world.host.running():
            await world.host.mount()
            yield world, mounted
            mounted.release()
            await world.all_released()


# --- calls -----------------------------------------------------------------------------------


async def test_calls_do_what_the_functions_do(tmp_path: Path) -> None:
    async with on_mount(tmp_path) as (world, _):
        mount = await world.host.mount()
        assert mount is not None
        assert (mount.source, mount.read_only) == ("mountpoint-s3", False)
        assert await world.host.list_attempts() == []
        published = await world.publish(3)
        assert world.trainer.keys() == [published.commit_key]
        assert [str(one) for one in await world.host.list_attempts()] == [ATTEMPT]
        assert await world.host.list_commits(ATTEMPT, 3) == []
        staged = await world.staged()
        assert staged.path == world.staging / published.adapter.digest
        assert load(staged.path, max_rank=8)
        assert await world.host.list_versions() == {ATTEMPT: [3]}
        assert await world.host.prune(ATTEMPT, 3) == 3
        assert await world.host.list_versions() == {}


async def test_errors_keep_their_kind(tmp_path: Path) -> None:
    async with on_folder(tmp_path) as world:
        with pytest.raises(AdapterRefusedError, match="is not the key of a commit"):
            await world.host.read_commit("x", run="run", public_key=PUBLIC_KEY)
        key = f"commits/{ATTEMPT}/000000/v000001.toml"
        with pytest.raises(BucketUnavailableError, match="ENOENT"):
            await world.host.read_commit(key, run="run", public_key=PUBLIC_KEY)
        pid = world.pid()
        await world.host.list_attempts()
        assert world.pid() == pid


async def test_new_commits_are_told(tmp_path: Path) -> None:
    async with on_folder(tmp_path) as world:
        await world.host.watch(ATTEMPT)
        await world.host.watch(ATTEMPT)
        await world.change()
        await world.publish(1)
        await world.change()
        os.kill(world.pid(), signal.SIGKILL)
        with suppress(BucketUnavailableError):
            await world.host.list_attempts()
        await world.host.watch(ATTEMPT)  # the next worker watches too
        await world.change()


async def test_one_that_is_ended_at_once_leaves_nobody(tmp_path: Path) -> None:
    host = BucketHost(str(tmp_path), "run", Agent())

    async def fail() -> None:
        async with host.running():
            await trio.lowlevel.checkpoint()  # the worker is being started
            raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await fail()
    assert host._worker is None
    assert host.hung_calls() == []


# --- hangs -----------------------------------------------------------------------------------

Ask = Callable[[World], Awaitable[object]]
KILLABLE: Final = ("stage",)  # it waits for a page of the cache, which SIGKILL ends
HANGS: Final[dict[str, tuple[Operation, str, Ask]]] = {
    "list": ("readdir", "*", lambda world: world.newest()),
    "read": ("open", "*.toml", lambda world: world.staged()),
    "stage": ("read", "*.safetensors", lambda world: world.staged()),
    "write": ("write", "*.safetensors", lambda world: world.publish(2)),
    "make": ("mkdir", "*", lambda world: world.publish(2)),
    "create": ("create", "*.json", lambda world: world.publish(2)),
    "open": ("open", "*.safetensors", lambda world: world.publish(2)),
    "sync": ("fsync", "*.json", lambda world: world.publish(2)),
    "close": ("close", "*.toml", lambda world: world.publish(2)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name != "list" else name for name in HANGS],
)
async def test_a_hang_is_an_error_in_time_and_the_agent_goes_on(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operation, pattern, ask = HANGS[name]
    async with on_mount(tmp_path) as (world, mounted):
        await world.publish(1)
        mounted.hang(operation, pattern=pattern)
        began = trio.current_time()
        with pytest.raises(BucketUnavailableError, match="the mount does not answer") as caught:
            await ask(world)
        assert SILENCE_S <= trio.current_time() - began < 3 * SILENCE_S
        assert f"umount -l {mounted.path}" in caught.value.fix
        hung = world.host.hung_calls()
        assert [runs(one.pid) for one in hung] == [True] * (name not in KILLABLE)
        told = world.host.hung()
        for one in hung:
            assert f"fuse mountpoint-s3 on {mounted.path} does not answer and holds pid " in told
            assert f"{one.pid} in {one.call} for " in told
        (warning,) = [one for one in caplog.records if one.message == "mount.hung"]
        assert warning.levelname == "WARNING"

        began = trio.current_time()  # it is not tried again at once
        with pytest.raises(BucketUnavailableError, match="the mount does not answer"):
            await ask(world)
        assert trio.current_time() - began < BACKOFF_S

        mounted.release()
        await world.all_released()
        assert not any(runs(one.pid) for one in hung)
        assert world.host.hung() == ""
        await world.works_again()
        await ask(world)


@pytest.mark.slow
async def test_a_hung_mount_holds_a_few_workers_and_a_remount_needs_no_restart(
    tmp_path: Path,
) -> None:
    async with on_mount(tmp_path) as (world, mounted):
        mounted.hang("readdir")
        with trio.move_on_after(3 * (SILENCE_S + 4 * BACKOFF_S)):
            while True:
                with pytest.raises(BucketUnavailableError):
                    await world.host.list_attempts()
                await trio.sleep(0.05)
        held = world.host.hung_calls()
        assert len(held) == 3
        assert held[0].seconds > held[1].seconds > held[2].seconds
        mounted.remount()
        await world.works_again()


async def test_an_agent_ends_at_once_while_the_mount_holds_its_worker(tmp_path: Path) -> None:
    with StrictBucket(tmp_path).mount("host") as mounted:
        mounted.hang("readdir")
        command = [sys.executable, "-c", AGENT, str(mounted.path)]
        # Nobody who reads what it writes has to wait for the worker either.
        with trio.fail_after(PATIENCE_S):
            done = await trio.run_process(  # noqa: TID251 - a whole agent
                command, env=worker_environment(), capture_stdout=True, capture_stderr=True
            )
        pid = int(done.stdout)
        assert runs(pid)
        mounted.release()
        with trio.fail_after(PATIENCE_S):
            while runs(pid):  # noqa: ASYNC110 - the kernel tells nobody
                await trio.sleep(0.01)


# --- mounts that go --------------------------------------------------------------------------


async def test_a_dead_mount_has_a_name(tmp_path: Path) -> None:
    async with on_mount(tmp_path) as (world, mounted):
        mounted.kill()
        with pytest.raises(BucketUnavailableError, match="the mount is dead"):
            await world.host.list_attempts()
        mounted.remount()
        await world.host.list_attempts()


async def test_a_bare_mount_point_is_known_by_a_new_worker_too(tmp_path: Path) -> None:
    async with on_mount(tmp_path) as (world, mounted):
        await world.publish(1)
        mounted.unmount()
        for _ in range(2):
            with pytest.raises(BucketUnavailableError, match="is gone; the path is now on"):
                await world.host.list_commits(ATTEMPT, -1)
            os.kill(world.pid(), signal.SIGKILL)
            with pytest.raises(BucketUnavailableError, match=r"ended|is gone"):
                await world.host.list_commits(ATTEMPT, -1)
        assert list(mounted.path.iterdir()) == []
        mounted.remount()
        await world.works_again()
        assert await world.newest()


# --- workers that go -------------------------------------------------------------------------


async def test_a_worker_that_dies_fails_one_call_only(tmp_path: Path) -> None:
    async with on_folder(tmp_path) as world:
        await world.publish(1)
        pid = world.pid()
        os.kill(pid, signal.SIGSTOP)  # so that the call is under way when it dies
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_soon, pid)
            with pytest.raises(BucketUnavailableError, match=r"ended during .* exit status -9"):
                await world.newest()
        assert world.host.hung_calls() == []
        assert await world.newest()
        assert world.pid() != pid


async def test_a_worker_that_dies_between_calls_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_folder(tmp_path) as world:
        await world.publish(1)
        pid = world.pid()
        os.kill(pid, signal.SIGKILL)
        with trio.fail_after(PATIENCE_S):
            while "bucket.worker_ended" not in caplog.text:  # noqa: ASYNC110 - logs tell nobody
                await trio.sleep(0.01)
        assert await world.newest()
        assert world.pid() != pid
    assert caplog.text.count("bucket.worker_ended") == 1  # those that are told to end are no news


async def _kill_soon(pid: int) -> None:
    await trio.sleep(SILENCE_S / 4)
    os.kill(pid, signal.SIGKILL)


async def test_a_worker_that_stands_still_is_replaced(tmp_path: Path) -> None:
    async with on_folder(tmp_path) as world:
        os.kill(world.pid(), signal.SIGSTOP)
        with pytest.raises(BucketUnavailableError, match="does not answer") as caught:
            await world.host.list_attempts()
        assert "umount" not in caught.value.fix
        await world.works_again()


async def test_an_agent_that_stood_still_itself_does_not_blame_the_mount(tmp_path: Path) -> None:
    async with on_folder(tmp_path) as world:
        await world.publish(1)
        pid = world.pid()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stand_still)
            assert await world.newest()
        assert world.pid() == pid


async def _stand_still() -> None:
    await trio.testing.wait_all_tasks_blocked()  # it has asked
    time.sleep(1.5 * SILENCE_S)  # noqa: TID251, ASYNC251 - as a host does that is out of memory


@pytest.mark.slow
async def test_slow_is_not_hung(tmp_path: Path) -> None:
    """Each step takes less than the silence allowed, all of them much more."""
    with StrictBucket(tmp_path).mount("host", latency_s={"read": 0.1}) as mounted:
        world = World(tmp_path, mounted.path)
        local = world.trainer.save(1, hidden=100_000)
        async with world.host.running():
            began = trio.current_time()
            world.trainer.publish(1, local)
            await world.staged()
            assert trio.current_time() - began > 2 * SILENCE_S


async def test_the_late_answer_to_a_call_that_was_given_up_is_nobody_elses(tmp_path: Path) -> None:
    async with on_mount(tmp_path) as (world, mounted):
        published = await world.publish(1)
        pid = world.pid()
        mounted.hang("readdir")
        with trio.move_on_after(0.3) as scope:
            await world.host.list_attempts()
        assert scope.cancelled_caught
        mounted.release()
        assert await world.host.list_commits(ATTEMPT, -1) == [published.commit_key]
        assert world.pid() == pid
