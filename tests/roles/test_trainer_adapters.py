"""What TRL's load call gets, whatever the bucket and the proxy do meanwhile."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.config.sections import Config, Trainer
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_adapters import PINNED_S, Adapters
from asyncgrpo_agent.roles.trainer_link import Channel, TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store.bucket import PublishedAdapter, publish
from asyncgrpo_agent.wire import messages as m
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY, FakeTrainer

TRL_WAITS_S: Final = 1800.0  # the default of VLLMClient.load_lora_adapter, which nobody changes
HANGS: Final = "fuse mountpoint-s3 on /mnt does not answer and holds pid 7 in Publish for 9 s"


@dataclass
class PlainBucket:
    """What a BucketHost does to publish, without its worker; away until a moment of the clock."""

    run_dir: Path
    back_at: float = 0.0

    def hung(self) -> str:
        return HANGS

    async def publish(self, local_dir: Path, **options: Any) -> PublishedAdapter:
        await trio.lowlevel.checkpoint()
        if trio.current_time() < self.back_at:
            raise BucketUnavailableError("the mount is dead", where="/mnt")
        return publish(local_dir, self.run_dir, **options)


@dataclass
class Control:
    """The proxy's end of the control stream; it may take its time."""

    sent: list[m.Published] = field(default_factory=list)
    retired: list[m.Retired] = field(default_factory=list)
    slow_s: list[float] = field(default_factory=list)

    async def send(self, message: m.Published | m.Retired) -> None:
        if isinstance(message, m.Retired):
            self.retired.append(message)
        else:
            self.sent.append(message)
        await trio.sleep(self.slow_s.pop(0) if self.slow_s else 0.0)


@dataclass
class World:
    """A trainer with one adapter of TRL's."""

    folder: Path
    sync_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        (self.folder / "bucket").mkdir()
        self.bucket = PlainBucket(self.folder / "bucket" / "run")
        self.control = Control()
        self.saved = FakeTrainer(self.folder / "local", self.bucket.run_dir).save(1)
        join = Join(
            addresses=(),
            ca_der=b"",
            token="",
            role="trainer",
            run="run",
            run_public_key=PUBLIC_KEY,
            run_private_key=PRIVATE_KEY,
        )
        link = TrainerLink(join, "i", "host", Random(1), print, trio.sleep_forever, print)
        link.attempt, link._control = ATTEMPT, cast("Channel", self.control)
        config = Config(role="trainer", trainer=Trainer(sync_timeout_s=self.sync_timeout_s))
        host = cast("BucketHost", self.bucket)
        self.adapters = Adapters(
            config, join, link, host, Turns(), "ab" * 32, lambda kind, **fields: None, lambda: 8
        )

    async def load(self) -> None:
        await self.adapters.publish("trl-policy-v1", str(self.saved))

    def report(self) -> None:
        adapter = self.control.sent[-1].adapter
        self.adapters.reported(m.SyncReport(adapter, ["r"], [], {}, 1, 1, False, "", 0.1))


async def test_a_load_call_returns_with_the_report(
    tmp_path: Path, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    world = World(tmp_path)
    began = trio.current_time()
    async with trio.open_nursery() as calls:
        calls.start_soon(world.load)
        await trio.sleep(2.0)
        world.report()
    assert trio.current_time() - began == 2.0


async def test_two_calls_for_one_adapter_are_both_answered(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The proxy restarts while it is told of the second; the first one's report is for both."""
    world = World(tmp_path)
    world.control.slow_s = [0.0, 5.0]
    async with trio.open_nursery() as calls:
        calls.start_soon(world.load)
        calls.start_soon(world.load)
        await trio.sleep(1.0)
        world.report()
    assert trio.current_time() < 10.0
    assert not world.adapters._waiting
    assert world.adapters.live == [world.control.sent[0].adapter.name]


async def test_without_a_report_the_call_returns_all_the_same(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world, began = World(tmp_path), trio.current_time()
    await world.load()
    assert 30.0 < trio.current_time() - began < 40.0


async def test_trl_waits_for_a_bucket_that_is_away_for_half_an_hour_nearly(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world, began = World(tmp_path, sync_timeout_s=600.0), trio.current_time()
    world.bucket.back_at = began + 1700.0
    assert not world.adapters.is_unwritten
    async with trio.open_nursery() as calls:
        calls.start_soon(world.load)
        await trio.sleep(1000.0)
        assert world.adapters.is_unwritten
    assert trio.current_time() - began < TRL_WAITS_S
    assert not world.adapters.is_unwritten
    assert len(world.control.sent) == 1
    waits = [one for one in caplog.records if one.message == "adapter.unpublished"]
    assert len(waits) > 10
    fields = waits[0].__dict__["agent_fields"]
    assert "the mount is dead" in fields["reason"]
    assert fields["hung"] == HANGS


async def test_an_outage_longer_than_trl_waits_ends_with_its_reason(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    world, began = World(tmp_path), trio.current_time()
    world.bucket.back_at = float("inf")
    with pytest.raises(BucketUnavailableError, match="the mount is dead"):
        await world.load()
    assert TRL_WAITS_S - 100.0 < trio.current_time() - began < TRL_WAITS_S
    assert not world.control.sent
    assert not world.adapters.live


async def test_a_slow_report_does_not_outlast_trls_patience(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world, began = World(tmp_path, sync_timeout_s=7200.0), trio.current_time()
    await world.load()
    assert trio.current_time() - began < TRL_WAITS_S


async def test_a_version_that_is_evaluated_stays_between_two_answers(
    tmp_path: Path, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    world = World(tmp_path)
    await world.load()
    (name,) = world.adapters.live
    nursery.start_soon(world.adapters.retire_idle)
    for _ in range(3):
        world.adapters.begin(name, is_evaluated=True)
        world.adapters.retire("trl-policy-v1")
        await trio.sleep(100.0)
        world.adapters.finish(name)
        await trio.sleep(PINNED_S - 1)
        assert world.adapters.live == [name]
    await trio.sleep(2.0)
    assert (world.adapters.live, world.control.retired) == ([], [m.Retired([name], [])])


async def test_a_name_goes_once_no_rollout_in_flight_uses_it(
    tmp_path: Path, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    world = World(tmp_path)
    await world.load()
    (name,) = world.adapters.live
    nursery.start_soon(world.adapters.retire_idle)
    for _ in range(2):
        world.adapters.begin(name)
    world.adapters.retire("trl-policy-v1")
    await trio.sleep(100.0)
    world.adapters.finish(name)
    await trio.sleep(100.0)
    assert (world.adapters.live, world.control.retired) == ([name], [])
    world.adapters.finish(name)
    await trio.sleep(1.0)
    assert (world.adapters.live, world.control.retired) == ([], [m.Retired([name], [])])
