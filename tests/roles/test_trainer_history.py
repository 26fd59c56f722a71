"""A run's history is in its bucket, and the bucket's failures cost none of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from asyncgrpo_agent.config.sections import Agent
from asyncgrpo_agent.core import segments
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.segments import Joined, decode
from asyncgrpo_agent.roles import trainer_history
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_history import HistoryMirror
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store.history import History
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.segments import list_segments, read_segments
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY
from fakes.strict_mount import Host, StrictBucket

JOIN = Join(
    addresses=(),
    ca_der=b"",
    token="",
    role="trainer",
    run="run",
    run_public_key=PUBLIC_KEY,
    run_private_key=PRIVATE_KEY,
)


@dataclass
class World:
    """One host's history, and what the bucket has of the run."""

    history: History
    mirror: HistoryMirror
    run_dir: Path

    def objects(self) -> list[str]:
        return [key.key for key in list_segments(Listing(self.run_dir))]

    def steps(self) -> list[int]:
        """As a reader puts them together."""
        joined, found = Joined(), []
        listing = Listing(self.run_dir)
        for data in read_segments(listing, list_segments(listing)):
            if (segment := decode(data)) is not None:
                found += [record["step"] for record in joined.add(segment)]
        return found

    def record(self, *steps: int, **fields: Any) -> None:
        for step in steps:
            self.history.record("metrics", float(step), step=step, values=fields)


@asynccontextmanager
async def world(
    folder: Path, bucket: Path, attempt: str = ATTEMPT, **options: Any
) -> AsyncIterator[World]:
    link = TrainerLink(JOIN, "i", "host", Random(1), print, trio.sleep_forever, print)
    link.attempt = attempt
    path = folder / "history.jsonl"
    with History(path) as history:
        async with BucketHost(str(bucket), "run", Agent()).running() as host:
            mirror = HistoryMirror(path, "run", link, host, Turns(), **options)
            yield World(history, mirror, bucket / "run")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


async def test_every_attempt_goes_on_where_the_bucket_ends(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path / "one", bucket) as made:
        made.record(1, 2)
        await made.mirror.finish(60.0)
        await made.mirror.finish(60.0)
        assert made.objects() == [f"events/{ATTEMPT}/000000.jsonl"]
        made.record(3)
        await made.mirror.finish(60.0)
        made.record(4)  # killed: nobody copies this one
    async with world(tmp_path / "one", bucket, "a0002-0000") as made:
        made.record(5)
        await made.mirror.finish(60.0)
    async with world(tmp_path / "two", bucket, "a0003-0000") as made:  # on another host
        made.record(6)
        await made.mirror.finish(60.0)
        assert made.steps() == [1, 2, 3, 4, 5, 6]
        assert len(made.objects()) == 4


async def test_a_long_history_takes_several(
    tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_history, "SEGMENT_BYTES", 40_000)
    async with world(tmp_path, bucket) as made:
        made.record(*range(2000))
        await made.mirror.finish(60.0)
        assert 2 <= len(made.objects()) <= 4
        assert made.steps() == list(range(2000))
        assert all((made.run_dir / key).stat().st_size < 80_000 for key in made.objects())


async def test_it_is_copied_while_the_attempt_goes_on(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path, bucket, every_s=0.01) as made, trio.open_nursery() as nursery:
        made.record(1)
        nursery.start_soon(made.mirror.run)
        with trio.fail_after(20):
            while not made.objects():  # noqa: ASYNC110 - another process writes them
                await trio.sleep(0.01)
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert len(made.objects()) == 1


async def test_a_mount_that_fails_loses_nothing(tmp_path: Path) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer") as mounted:
        async with world(tmp_path, mounted.path) as made:
            made.record(1)
            mounted.fail("write", 5, pattern="*events/*", times=1000)
            await made.mirror.finish(60.0)
            made.record(2)
            mounted.release()
            await made.mirror.finish(60.0)
            assert made.steps() == [1, 2]


async def test_a_write_whose_answer_was_lost_is_read_once(tmp_path: Path) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer") as mounted:
        async with world(tmp_path, mounted.path) as made:
            made.record(1)
            await made.mirror.finish(60.0)
            made.record(2)
            await cut_short(mounted, made)
            made.record(3)
            await made.mirror.finish(60.0)
            assert made.steps() == [1, 2, 3]
            assert f"events/{ATTEMPT}/000001-r1.jsonl" in made.objects()


async def cut_short(mounted: Host, made: World) -> None:
    """The worker is killed as it ends its write."""
    mounted.kill_caller("close", pattern="*events/*")
    await made.mirror.finish(60.0)
    mounted.release()


async def test_it_waits_for_adapters_and_not_for_long_at_the_end(
    tmp_path: Path, bucket: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with world(tmp_path, bucket) as made:
        made.record(1)
        with made.mirror.turns.publishing():
            await made.mirror.finish(3.0)
        assert trio.current_time() == 3.0
        assert made.objects() == []


async def test_no_secret_is_copied(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path, bucket, secrets=["hf_planted0123456789"]) as made:
        for number, text in enumerate(
            (
                "401 with hf_planted0123456789",
                "see https://me:planted0123@proxy:9/x",
                "agrpo1." + "A" * 40,
            )
        ):
            made.history.record("error", 1.0, step=number, what=text)
        await made.mirror.finish(60.0)
        assert made.steps() == [0, 1, 2]
        (key,) = made.objects()
        data = (made.run_dir / key).read_bytes()
        assert b"planted" not in data
        assert b"A" * 16 not in data
        assert segments.decode(data) is not None
