"""Publishing and staging over real mounts of a real S3 server, by rclone and by s3fs.

What the strict mount shows in depth is seen here to hold on mounts that others made.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from asyncgrpo_agent.store.bucket import list_commits
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import is_remote, mount_of
from asyncgrpo_agent.store.segments import list_segments, read_segments, write_segment
from asyncgrpo_agent.store.staging import StagedAdapter, clean, stage
from fakes import s3_mounts, seaweedfs
from fakes.adapters import load
from fakes.bucket import ATTEMPT, Doomed, FakeTrainer
from fakes.processes import peak_rss_mib
from fakes.s3_mounts import KINDS, Kind, S3Mount
from fakes.seaweedfs import S3Relay, Store

pytestmark = pytest.mark.slow

FRESH_S = 5.0  # in which a mount shows what another wrote; both believe a listing for 1 s at most
BIG = 100_000  # hidden: makes weights of 6.4 MB


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The mounts of a trainer's host and of a replica's, and what the replica's asks S3 for."""

    trainer: S3Mount
    replica: S3Mount
    relay: S3Relay
    local: Path

    def run(self, name: str) -> tuple[FakeTrainer, FakeTrainer]:
        """One run as both hosts see it."""
        run = f"{self.replica.kind}-{name}"
        here = FakeTrainer(self.local / run, self.trainer.path / run)
        return here, replace(here, run_dir=self.replica.path / run)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with seaweedfs.serving(tmp_path_factory.mktemp("s3")) as made:
        yield made
        assert peak_rss_mib(made.pid) < 500


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    with (
        S3Relay(store.address) as relay,
        s3_mounts.mounted(kind, store.address, folder / "trainer") as trainer,
        s3_mounts.mounted(kind, relay.address, folder / "replica", read_only=True) as replica,
    ):
        yield Pair(trainer=trainer, replica=replica, relay=relay, local=folder / "local")


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + FRESH_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # noqa: TID251 - mounts have no virtual clock


def stage_newest(run: FakeTrainer, staging: Path) -> StagedAdapter:
    clean(staging)
    listed = run.read(run.keys()[0])
    return stage(run.run_dir, listed.commit, staging, max_rank=8)


def test_what_is_published_on_one_host_is_staged_on_another(pair: Pair, tmp_path: Path) -> None:
    here, there = pair.run("published")
    for version in range(3):
        published = here.publish(version, here.save(version, hidden=BIG))
        wait_until(lambda: len(there.keys()) == version + 1)  # noqa: B023 - called at once
        assert there.keys()[0] == published.commit_key
        staged = stage_newest(there, tmp_path / "staged")
        assert staged.digest == published.adapter.digest
        assert staged.total_bytes == published.total_bytes > 64 * BIG
        assert load(staged.path, max_rank=8)
    assert there.keys() == here.keys()


def test_a_replicas_mount_is_known_and_read_only(pair: Pair) -> None:
    mount = mount_of(pair.replica.path)
    assert mount is not None
    assert f"{mount.fs_type} {mount.source}" == s3_mounts.IN_TABLE[pair.replica.kind]
    assert mount.read_only
    assert is_remote(mount)


# --- a publisher that dies -------------------------------------------------------------------


def test_a_publisher_that_is_killed_leaves_a_cut_object_and_no_adapter(
    pair: Pair, tmp_path: Path
) -> None:
    here, there = pair.run("killed")
    here.publish(0)
    local = here.save(1, hidden=BIG)
    weights = local / "adapter_model.safetensors"
    size_bytes = weights.stat().st_size
    victim = multiprocessing.get_context("forkserver").Process(
        target=here.publish,
        args=(1, local),
        # The files are read twice, first to be inspected.
        kwargs={"heartbeat": Doomed(left_bytes=size_bytes * 3 // 2)},
    )
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL

    left = there.run_dir / f"adapters/{ATTEMPT}/v000001"
    wait_until(lambda: weights.name in Listing(there.run_dir).names(f"adapters/{ATTEMPT}/v000001"))
    assert 0 < (left / weights.name).stat().st_size < size_bytes
    assert len(there.keys()) == 1

    published = here.publish(1, local)
    assert "v000001" in published.commit_key
    wait_until(lambda: len(there.keys()) == 2)
    assert stage_newest(there, tmp_path / "staged").digest == published.adapter.digest


# --- what it costs ---------------------------------------------------------------------------


# The bucket, the run, commits/, the attempt and its newest folder: rclone lists all of them again
# once a second has passed, s3fs the two that it is asked to.
def test_a_look_costs_a_listing_a_folder_and_nothing_an_object(pair: Pair) -> None:
    (here, there), commits, looks = pair.run("counted"), 10, 3
    for version in range(commits):
        here.publish(version)
    wait_until(lambda: len(there.keys()) == commits)
    listing = Listing(there.run_dir)
    list_commits(there.run_dir, ATTEMPT, 0, listing=listing)
    before = pair.relay.requests.copy()
    for _ in range(looks):
        time.sleep(1.1)  # noqa: TID251 - until the mount no longer believes its last listing
        assert len(list_commits(there.run_dir, ATTEMPT, 0, listing=listing)) == commits - 1
    spent = pair.relay.requests - before
    print(pair.replica.kind, {name: n / looks for name, n in spent.items()})  # noqa: T201
    budget = {"rclone": 5, "s3fs": 2}[pair.replica.kind]
    assert 0 < spent.pop("list") <= looks * budget
    assert sum(spent.values()) <= looks  # a HEAD of some folder now and then


def test_a_history_is_written_and_read(pair: Pair) -> None:
    here, there = pair.run("history")
    for number in range(3):
        write_segment(Listing(here.run_dir), ATTEMPT, number, b"%d" % number * 100_000)
    deadline = time.monotonic() + FRESH_S
    while len(keys := list_segments(Listing(there.run_dir))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # noqa: TID251 - the mount has a clock of its own
    found = read_segments(Listing(there.run_dir), keys)
    assert found == [b"%d" % number * 100_000 for number in range(3)]
