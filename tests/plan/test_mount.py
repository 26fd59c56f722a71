"""The simulated mount asks S3 for as much as the real store code does on Mountpoint's rules."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from asyncgrpo_agent.plan.inputs import MB, Bucket
from asyncgrpo_agent.plan.mount import PART_BYTES, S3, Mount, Requests
from asyncgrpo_agent.plan.timeline import Process, Timeline
from asyncgrpo_agent.store import staging
from asyncgrpo_agent.store.bucket import list_commits
from asyncgrpo_agent.store.listing import Listing
from fakes.bucket import ATTEMPT, FakeTrainer
from fakes.strict_mount import Counters, StrictBucket

KERNEL_S = 0.1  # for so long the strict mount's kernel believes what it saw


def site(bucket: Bucket, **options: float) -> tuple[Timeline, Mount]:
    timeline = Timeline()
    return timeline, Mount(S3(bucket, timeline, Random(1)), 1e9, run="run", **options)  # type: ignore[arg-type]


def asked(timeline: Timeline, mount: Mount, process: Process) -> Requests:
    """By one call, an hour after the last."""
    timeline.run(timeline.now + 3600.0)
    mount.asked = Requests()
    timeline.start(process)
    timeline.run(timeline.now + KERNEL_S / 2)
    return mount.asked


@pytest.mark.slow
def test_it_asks_for_what_the_real_code_asks_for(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    quick = Bucket(latency_s=0.0, requests_per_s=1e12)
    here = site(quick, file_ttl_s=KERNEL_S, folder_ttl_s=KERNEL_S)
    there = site(quick, file_ttl_s=KERNEL_S, folder_ttl_s=KERNEL_S)
    with bucket.mount("trainer") as writer, bucket.mount("replica", read_only=True) as reader:
        trainer = FakeTrainer(tmp_path / "local", writer.path / "run")
        replica = replace(trainer, run_dir=reader.path / "run")
        listing = Listing(replica.run_dir)
        staging.clean(tmp_path / "staged")
        for version in range(3):
            writer.remount()  # the kernel has forgotten all, as it has after a second
            published = trainer.publish(version)
            simulated = asked(*here, here[1].publish(version, published.total_bytes))
            if version:  # the first one makes the folders
                real = writer.counters()
                assert abs(real.head - simulated.head) <= 3
                assert abs(real.list - simulated.list) <= 3
                assert simulated.put == real.put + 2 * 3  # begin and end of three uploads
            reader.remount()
            (key, *_) = list_commits(replica.run_dir, ATTEMPT, -1, listing=listing)
            simulated = asked(*there, there[1].list_commits(0, version))
            assert_same(reader.counters(), simulated)
            reader.remount()
            commit = replica.read(key).commit
            assert_same(reader.counters(), asked(*there, there[1].read_commit(version)))
            reader.remount()
            staging.stage(replica.run_dir, commit, tmp_path / "staged", max_rank=8, listing=listing)
            size_bytes = published.total_bytes
            simulated = asked(*there, there[1].read_adapter(version, size_bytes))
            assert_same(reader.counters(), simulated)


def assert_same(real: Counters, simulated: Requests) -> None:
    """A slow machine's kernel forgets in between, and asks a few times more."""
    assert real.get == simulated.get
    assert simulated.head <= real.head <= simulated.head + 3
    assert simulated.list <= real.list <= simulated.list + 3


def test_large_files_are_read_and_written_in_parts() -> None:
    timeline, mount = site(Bucket(latency_s=0.0))
    size_bytes = 10 * PART_BYTES
    assert asked(timeline, mount, mount.read_adapter(1, size_bytes)).get == 1 + 1 + 10
    assert asked(timeline, mount, mount.publish(2, size_bytes)).put == 3 + (2 + 10) + 3


def test_a_look_now_and_then_costs_eight_requests() -> None:
    timeline, mount = site(Bucket(latency_s=0.001))
    timeline.start(mount.list_commits(3, 3))
    timeline.run(10.0)
    found = asked(timeline, mount, mount.list_commits(3, 3))
    assert (found.head, found.list) == (3, 3 + 2)


def test_beyond_its_limit_the_bucket_makes_requests_wait() -> None:
    timeline = Timeline()
    s3 = S3(Bucket(latency_s=0.0, requests_per_s=100.0), timeline, Random(1))
    assert [s3.answer_s(50) for _ in range(3)] == pytest.approx([0.0, 0.5, 1.0])
    assert s3.queued_s == pytest.approx(50 * 1.5)


def test_bytes_take_as_long_as_the_hosts_line_says() -> None:
    timeline, mount = site(Bucket(latency_s=0.0, requests_per_s=1e12))
    mount.mb_per_s = 10.0
    ended: list[float] = []

    def process() -> Process:
        yield from mount.read_adapter(1, 20 * MB)
        ended.append(timeline.now)

    timeline.start(process())
    timeline.run(60.0)
    assert ended == [pytest.approx(2.0, abs=0.01)]
