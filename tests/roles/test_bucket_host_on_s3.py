"""The bucket's host on real mounts whose S3, or whose daemon, goes and comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.roles.bucket_host import BucketHost
from fakes import s3_mounts, seaweedfs
from fakes.bucket import ATTEMPT, PRIVATE_KEY, FakeTrainer
from fakes.s3_mounts import KINDS, S3Mount
from fakes.seaweedfs import S3Relay, Store

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
SILENCE_S = 1.5
BACKOFF_S = 0.3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with seaweedfs.serving(tmp_path_factory.mktemp("s3")) as made:
        yield made


@dataclass
class World:
    """A trainer's host, its mount, and its network to S3."""

    host: BucketHost
    mount: S3Mount
    relay: S3Relay
    trainer: FakeTrainer

    async def publish(self, version: int) -> None:
        local = self.trainer.folder / f"v{version}"
        await self.host.publish(
            local if local.exists() else self.trainer.save(version),
            run=self.trainer.run_dir.name,
            attempt=ATTEMPT,
            version=version,
            base_model="base",
            base_model_digest="ab" * 32,
            private_key=PRIVATE_KEY,
            live=[],
            now_unix_s=1.7e9,
            max_rank=8,
        )

    async def publishes_again(self, version: int) -> None:
        with trio.fail_after(PATIENCE_S):
            while True:
                with suppress(BucketUnavailableError):
                    return await self.publish(version)
                await trio.sleep(0.05)

    async def versions(self) -> list[int]:
        return (await self.host.list_versions())[ATTEMPT]


async def apart(act: Callable[..., object], *arguments: Any) -> None:
    """The relay's calls and the mounts' block."""
    await trio.to_thread.run_sync(act, *arguments)


@pytest.fixture(params=KINDS)
def mounted(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> Iterator[tuple[S3Relay, S3Mount]]:
    path = tmp_path / "mount"
    with (
        S3Relay(store.address) as relay,
        s3_mounts.mounted(request.param, relay.address, path) as m,
    ):
        yield relay, m
        relay.release()


@pytest.fixture
async def world(
    mounted: tuple[S3Relay, S3Mount], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    relay, mount = mounted
    run = f"{'outage' if 'outage' in request.node.name else 'death'}-{mount.kind}"
    trainer = FakeTrainer(tmp_path / "local", mount.path / run)
    host = BucketHost(str(mount.path), run, Agent(), silence_s=SILENCE_S, min_backoff_s=BACKOFF_S)
    async with host.running():
        made = World(host, mount, relay, trainer)
        await made.publish(0)
        yield made


async def test_an_outage_of_s3_names_the_mount_and_passes(world: World) -> None:
    await apart(lambda: world.relay.hold(up=True, down=True))
    with pytest.raises(BucketUnavailableError, match="does not answer") as caught:
        await world.publish(1)
    assert caught.value.where == str(world.trainer.run_dir)
    assert f"{s3_mounts.IN_TABLE[world.mount.kind]} on {world.mount.path}" in caught.value.fix
    await apart(world.relay.release)
    await world.publishes_again(1)
    await world.publish(2)
    assert await world.versions() == [0, 1, 2]
    with trio.fail_after(PATIENCE_S):
        while world.host.hung_calls():  # noqa: ASYNC110 - the kernel tells nobody
            await trio.sleep(0.05)


async def test_a_daemon_that_died_is_named_and_its_remount_is_found(world: World) -> None:
    world.mount.kill()
    for call in (lambda: world.publish(1), world.versions):
        with pytest.raises(BucketUnavailableError, match="the mount is dead"):
            await call()
    await apart(world.mount.remount)
    await world.publish(1)
    assert await world.versions() == [0, 1]
    await apart(world.mount.stop)
    with pytest.raises(BucketUnavailableError, match="is gone; the path is now on"):
        await world.publish(2)
    await apart(world.mount.remount)
    await world.publish(2)
    assert await world.versions() == [0, 1, 2]
