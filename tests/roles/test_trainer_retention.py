"""The bucket stays small, whatever a run's length, and nothing that is live ever leaves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Bucket, Config
from asyncgrpo_agent.core.adapters import parse_commit_key
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.retention import NAMED_S
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_adapters import Adapters
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_retention import FORBIDDEN_S, Retention
from asyncgrpo_agent.roles.trainer_turns import Turns
from fakes.bucket import ATTEMPT, PUBLIC_KEY, FakeTrainer
from fakes.strict_mount import StrictBucket


@dataclass
class World:
    """A trainer that has published a few versions, and what it would remove now."""

    trainer: FakeTrainer
    retention: Retention
    turns: Turns
    records: list[dict[str, object]]
    later_s: float = field(default=0.0)

    def now(self) -> float:
        return trio.current_time() + self.later_s

    def versions(self) -> list[int]:
        parts = [parse_commit_key(key) for key in self.trainer.keys()]  # noqa: SIM118
        return sorted(part.version for part in parts if part is not None)


def unconnected(host: BucketHost, turns: Turns) -> Adapters:
    """A trainer's adapters, without a proxy to tell of them."""
    join = Join(
        addresses=(), ca_der=b"", token="", role="trainer", run="run", run_public_key=PUBLIC_KEY
    )
    link = TrainerLink(join, "i", "host", Random(1), print, trio.sleep_forever, print)
    link.attempt = ATTEMPT
    return Adapters(Config(role="trainer"), join, link, host, turns, "ab" * 32, print, lambda: 8)


@asynccontextmanager
async def world(folder: Path, bucket: Path, **config: object) -> AsyncIterator[World]:
    trainer = FakeTrainer(folder / "local", bucket / "run")
    settings = Bucket(path=str(bucket), **config)  # type: ignore[arg-type]
    records: list[dict[str, object]] = []

    def record(kind: str, **fields: object) -> None:
        records.append({"kind": kind, **fields})

    async with BucketHost(str(bucket), "run", Agent()).running() as host:
        turns = Turns()
        adapters = unconnected(host, turns)
        retention = Retention(settings, adapters, host, turns, record)
        made = World(trainer, retention, turns, records)
        retention.clock = made.now
        for version in range(1, 6):
            published = trainer.publish(version)
            adapters.live = [*adapters.live, published.adapter.name][-2:]
        yield made


async def test_a_round_removes_what_no_rollout_can_name(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    async with world(tmp_path, tmp_path / "bucket") as made:
        third = made.trainer.read(made.trainer.keys()[2]).adapter.name
        made.retention.adapters.begin(third)
        made.retention.adapters.finish(third)
        await made.retention.round()
        assert made.versions() == [3, 4, 5]
        (record,) = made.records
        assert (record["kind"], record["versions"], record["objects"]) == ("pruned", 2, 6)
        made.later_s = NAMED_S
        await made.retention.round()
        assert made.versions() == [4, 5]
        await made.retention.round()
        assert len(made.records) == 2


async def test_after_the_end_nothing_counts_as_named(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    async with world(tmp_path, tmp_path / "bucket", keep_every=2) as made:
        made.retention.adapters.begin(made.trainer.read(made.trainer.keys()[4]).adapter.name)
        await made.retention.last_round()
        assert made.versions() == [2, 4, 5]


async def test_it_waits_for_publications(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    async with world(tmp_path, tmp_path / "bucket") as made:
        with made.turns.publishing(), trio.move_on_after(0.2) as scope:
            await made.retention.round()
        assert scope.cancelled_caught
        assert made.versions() == [1, 2, 3, 4, 5]


async def test_a_bucket_that_forbids_it_is_asked_once_an_hour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer") as mounted:
        async with world(tmp_path, mounted.path) as made:
            for _ in range(3):
                await made.retention.round()
            (warning,) = [r for r in caplog.records if r.message == "adapters.unprunable"]
            assert "--allow-delete" in str(vars(warning))
            assert len(mounted.calls("unlink")) == 3
            made.later_s = FORBIDDEN_S
            await made.retention.round()
            assert len(mounted.calls("unlink")) == 6
            assert made.versions() == [1, 2, 3, 4, 5]


async def test_other_trouble_is_left_to_the_next_round_and_leaves_no_remains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    with bucket.mount("trainer", allow_delete=True) as mounted:
        async with world(tmp_path, mounted.path) as made:
            mounted.fail("unlink", 5, pattern="*.safetensors", times=1)
            await made.retention.round()
            (warning,) = [r for r in caplog.records if r.message == "adapters.unpruned"]
            assert "EIO" in str(vars(warning))
            await made.retention.round()
            assert made.versions() == [4, 5]
            assert len(bucket.keys()) == 6


async def test_nothing_is_removed_where_nobody_wants_it(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    for config in ({"prune": False}, {"url": "s3://b/", "allow_delete": False}):
        async with world(tmp_path / str(len(config)), tmp_path / "bucket", **config) as made:
            await made.retention.run()
            await made.retention.last_round()
            assert 1 in made.versions()


async def test_names_are_forgotten_but_not_those_in_flight(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    adapters = unconnected(BucketHost(str(tmp_path), "run", Agent()), Turns())
    for number in range(100):
        adapters.begin(f"short-{number}")
        adapters.finish(f"short-{number}")
    adapters.begin("long")
    assert len(adapters.named_at()) == 101
    await trio.sleep(NAMED_S)
    assert adapters.named_at() == {"long": trio.current_time()}
    adapters.finish("long")
    await trio.sleep(NAMED_S)
    assert adapters.named_at() == {}
