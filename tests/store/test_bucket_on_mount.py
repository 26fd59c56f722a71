"""Publishing and staging over mounts as strict as Mountpoint's, and as unreliable as any.

Whatever fails, and wherever: a replica stages whole adapters or none, the publisher's error says
what is wrong with the bucket, and once the trouble is over all is well again.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.store.bucket import ListedCommit, list_commits
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import MountWatch
from asyncgrpo_agent.store.staging import StagedAdapter, clean, stage, staged
from fakes.adapters import CONFIG, WEIGHTS, load
from fakes.bucket import ATTEMPT, FakeTrainer
from fakes.strict_mount import HF_LIKE, Host, StrictBucket
from fakes.strict_mount_control import Operation

ERRNOS = [errno.EIO, errno.ENOENT, errno.ENOTCONN]
CHANGING: list[Operation] = ["mkdir", "create", "open", "write", "fsync", "close"]
WRITING: list[Operation] = ["readdir", "lookup", *CHANGING]
READING: list[Operation] = ["readdir", "lookup", "open", "read"]
BIG = 40_000  # hidden: makes weights of several writes


@dataclass
class Replica:
    """What a replica does with a bucket, without waiting between its tries."""

    run: FakeTrainer
    staging: Path
    waited: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        clean(self.staging)

    def stage(self, listed: ListedCommit) -> StagedAdapter:
        return stage(
            self.run.run_dir, listed.commit, self.staging, max_rank=8, wait=self.waited.append
        )

    def take_newest(self) -> str | None:
        """The digest of the newest adapter, once it is staged."""
        for key in self.run.keys():  # noqa: SIM118 - no mapping
            return self.stage(self.run.read(key)).digest
        return None

    def take_all(self) -> set[str]:
        """The digests of all that could be had, each checked to be whole."""
        for key in self.run.keys():  # noqa: SIM118
            try:
                self.stage(self.run.read(key))
            except (AdapterRefusedError, BucketUnavailableError):
                continue
        return self.whole()

    def whole(self) -> set[str]:
        for digest in staged(self.staging):
            load(self.staging / digest, max_rank=8)
        return staged(self.staging)


@dataclass
class Site:
    """A trainer's host and a replica's, and runs that have nothing to do with each other."""

    trainer: Host
    replica: Host
    local: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def pair(self, trainer: Host | None = None) -> tuple[FakeTrainer, Replica]:
        """Both ends of a new run."""
        run = f"run-{next(self.numbers)}"
        there = FakeTrainer(self.local / run, self.replica.path / run)
        here = replace(there, run_dir=(trainer or self.trainer).path / run)
        return here, Replica(there, self.local / run / "staged")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> StrictBucket:
    return StrictBucket(tmp_path_factory.mktemp("strict"))


@pytest.fixture(scope="module")
def mounted(bucket: StrictBucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        bucket.mount("trainer") as trainer,
        bucket.mount("replica", read_only=True, kernel_ttl_s=0) as replica,
    ):
        yield Site(trainer, replica, tmp_path_factory.mktemp("local"))


@pytest.fixture
def site(mounted: Site, bucket: StrictBucket) -> Iterator[Site]:
    yield mounted
    bucket.clear()
    mounted.trainer.release()
    mounted.replica.release()


def test_what_is_published_on_one_host_is_staged_on_another(site: Site) -> None:
    trainer, replica = site.pair()
    assert replica.take_newest() is None
    for version in range(3):
        published = trainer.publish(version)
        assert replica.take_newest() == published.adapter.digest
    assert load(replica.staging / published.adapter.digest, max_rank=8)
    assert replica.waited == []


# --- a publisher in trouble ------------------------------------------------------------------


def calls_of_a_publication(site: Site, op: Operation) -> int:
    trainer, _ = site.pair()
    local = trainer.save(7)
    before = len(site.trainer.calls(op))
    trainer.publish(7, local)
    return len(site.trainer.calls(op)) - before


@pytest.mark.parametrize("after", [False, True], ids=["lost", "answer-lost"])
@pytest.mark.parametrize(
    "op", ["readdir", pytest.param("lookup", marks=pytest.mark.slow), *CHANGING]
)
def test_one_failure_anywhere_while_publishing(site: Site, op: Operation, after: bool) -> None:
    count = calls_of_a_publication(site, op)
    assert count > 0
    for skip in range(count):
        numbers = ERRNOS if op in CHANGING else [ERRNOS[skip % len(ERRNOS)]]
        for number in numbers:
            trainer, replica = site.pair()
            site.trainer.fail(op, number, skip=skip, times=1, after=after)
            expected = publish_or_not(trainer, number)
            site.trainer.release()
            assert expected <= replica.take_all()
    again = trainer.publish(8)
    assert replica.take_newest() == again.adapter.digest


def publish_or_not(trainer: FakeTrainer, number: int) -> set[str]:
    """The digest of what was published, or an error that says why it was not."""
    try:
        return {trainer.publish(7).adapter.digest}
    except BucketUnavailableError as error:
        if errno.errorcode[number] not in str(error):
            raise
        return set()


@pytest.mark.parametrize(
    ("op", "number"),
    # The C library makes an empty folder of that one, which is no obstacle.
    [row for row in itertools.product(WRITING, ERRNOS) if row != ("readdir", errno.ENOENT)],
)
def test_lasting_failure_while_publishing(site: Site, op: Operation, number: int) -> None:
    trainer, replica = site.pair()
    site.trainer.fail(op, number)
    with pytest.raises(BucketUnavailableError, match=errno.errorcode[number]):
        trainer.publish(7)
    site.trainer.release()
    assert replica.take_all() == set()


def test_a_second_failure_costs_a_second_name(site: Site, bucket: StrictBucket) -> None:
    trainer, replica = site.pair()
    site.trainer.fail("fsync", errno.EIO, pattern=f"*/{WEIGHTS}", times=2)
    published = trainer.publish(7)
    assert replica.take_newest() == published.adapter.digest
    weights = [k for k in bucket.keys(trainer.run_dir.name) if k.endswith(WEIGHTS)]
    assert [key.split("/")[3] for key in weights] == ["v000007-r2"]


@pytest.mark.slow
@pytest.mark.parametrize("op", ["create", "open", "write", "fsync", "close"])
def test_a_publisher_killed_anywhere(site: Site, op: Operation) -> None:
    trainer, _ = site.pair()
    before = len(site.trainer.calls(op))
    trainer.publish(7, trainer.save(7, hidden=BIG))
    for skip in range(len(site.trainer.calls(op)) - before):
        trainer, replica = site.pair()
        local = trainer.save(7, hidden=BIG)
        site.trainer.kill_caller(op, skip=skip)
        victim = multiprocessing.get_context("forkserver").Process(
            target=trainer.publish, args=(7, local)
        )
        victim.start()
        victim.join()
        assert victim.exitcode == -9
        assert len(replica.take_all()) <= 1  # whole, if the commit was
        resumed = replace(trainer, attempt="a0002-0000").publish(8)
        replica.run = replace(replica.run, attempt="a0002-0000")
        assert replica.take_newest() == resumed.adapter.digest


def test_the_trainers_mount_dies(bucket: StrictBucket, site: Site) -> None:
    with bucket.mount("dying") as host, ThreadPoolExecutor(1) as pool:
        trainer, replica = site.pair(host)
        mount = MountWatch(host.path)
        host.hang("write", pattern=f"*/{WEIGHTS}")
        publishing = pool.submit(trainer.publish, 7, mount=mount)
        host.await_hung()
        host.kill()
        with pytest.raises(BucketUnavailableError, match="the mount is dead"):
            publishing.result()
        host.remount()
        assert replica.take_all() == set()
        published = trainer.publish(8, mount=mount)
        assert replica.take_newest() == published.adapter.digest
        host.unmount()
        with pytest.raises(BucketUnavailableError, match="is gone"):
            trainer.publish(9, mount=mount)
        host.remount()


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("op", ["mkdir", "create", "open", "write", "fsync", "close"])
def test_a_remount_anywhere_while_publishing(
    bucket: StrictBucket, site: Site, op: Operation, *, read_only: bool
) -> None:
    """The daemon dies during a call and another takes its place, not always with its flags."""
    with bucket.mount(f"remounted-{op}-{read_only}") as host, ThreadPoolExecutor(1) as pool:
        for skip in range(calls_of_a_publication(site, op)):
            trainer, replica = site.pair(host)
            mount = MountWatch(host.path)
            host.hang(op, skip=skip, pattern=f"{trainer.run_dir.name}*")
            publishing = pool.submit(trainer.publish, 7, mount=mount)
            host.await_hung()
            host.kill()
            host.remount(read_only=read_only)
            expected: set[str] = set()
            with suppress(BucketUnavailableError):
                expected = {publishing.result().adapter.digest}
            assert expected <= replica.take_all()
            if read_only:
                with pytest.raises(BucketUnavailableError, match="is read-only"):
                    trainer.publish(8, mount=mount)
                host.remount()
            again = trainer.publish(9, mount=mount)
            assert replica.take_newest() == again.adapter.digest


# --- two publishers --------------------------------------------------------------------------


def test_two_attempts_do_not_meet(bucket: StrictBucket, site: Site) -> None:
    with bucket.mount("zombie") as host, ThreadPoolExecutor(2) as pool:
        first, replica = site.pair()
        second = replace(first, run_dir=host.path / first.run_dir.name, attempt="a0002-0000")
        local = first.save(1)
        rounds = [pool.submit(end.publish, 1, local) for end in (first, second)]
        digests = {done.result().adapter.digest for done in rounds}
        assert replica.take_all() == digests
        replica.run = replace(replica.run, attempt="a0002-0000")
        assert replica.take_newest() in digests


@pytest.mark.parametrize("op", ["create", "write", "fsync", "close"])
def test_two_publishers_of_one_attempt_never_mix(
    bucket: StrictBucket, site: Site, op: Operation
) -> None:
    """Against the rules, and the bucket cannot prevent it: the last writer of a name wins."""
    with bucket.mount("second") as host, ThreadPoolExecutor(1) as pool:
        for skip in range(3):
            first, replica = site.pair()
            second = replace(first, run_dir=host.path / first.run_dir.name)
            ours, theirs = first.save(1), first.save(2)
            host.hang(op, skip=skip)
            late = pool.submit(second.publish, 7, theirs)
            host.await_hung()
            digests = {first.publish(7, ours).adapter.digest}
            host.release()
            digests.add(late.result().adapter.digest)
            assert replica.take_all() <= digests
            last = first.publish(8)
            assert replica.take_newest() == last.adapter.digest


# --- a replica in trouble --------------------------------------------------------------------


@pytest.mark.parametrize("number", [*ERRNOS, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("op", ["readdir", "open", "read"])
def test_one_failure_anywhere_while_staging(site: Site, op: Operation, number: int) -> None:
    trainer, replica = site.pair()
    digest = trainer.publish(7).adapter.digest
    skip = 0
    while is_struck(site, replica, op, number, skip, digest):
        skip += 1
    assert skip > 1


@pytest.mark.slow
def test_one_failed_lookup_anywhere_while_staging(site: Site) -> None:
    """Every part of every path is looked up, so that an errno each in turn has to do."""
    trainer, replica = site.pair()
    digest = trainer.publish(7).adapter.digest
    skip = 0
    while is_struck(site, replica, "lookup", ERRNOS[skip % len(ERRNOS)], skip, digest):
        skip += 1
    assert skip > 20


def is_struck(
    site: Site, replica: Replica, op: Operation, number: int, skip: int, digest: str
) -> bool:
    """Whether there was a call to fail. Before the trouble is over, nothing or all is staged."""
    fresh = Replica(replica.run, replica.staging.with_name(f"staged-{skip}"))
    before = len(site.replica.calls(op))
    site.replica.fail(op, number, skip=skip, times=1)
    with suppress(BucketUnavailableError):
        fresh.take_newest()
    assert fresh.whole() <= {digest}
    struck = any(call.number == number for call in site.replica.calls(op)[before:])
    site.replica.release()
    assert fresh.take_newest() == digest
    return struck


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("op", READING)
def test_lasting_failure_while_staging(site: Site, op: Operation, number: int) -> None:
    trainer, replica = site.pair()
    digest = trainer.publish(7).adapter.digest
    listed = replica.run.read(replica.run.keys()[0])
    site.replica.fail(op, number)
    with pytest.raises(BucketUnavailableError):
        replica.stage(listed)
    assert list(replica.staging.iterdir()) == []
    site.replica.release()
    assert replica.take_newest() == digest


def test_a_mount_that_shows_nothing_for_a_while_has_pruned_nothing(site: Site) -> None:
    """Folders that were listed before, and now do not exist: that is the mount, not a pruner."""
    trainer, _ = site.pair()
    trainer.publish(7)
    _, replica = site.pair()
    replica.run = replace(replica.run, run_dir=site.replica.path / trainer.run_dir.name)
    listing = Listing(replica.run.run_dir)
    (key,) = list_commits(replica.run.run_dir, ATTEMPT, -1, listing=listing)
    listed = replica.run.read(key)
    site.replica.fail("readdir", errno.ENOENT, pattern=f"{trainer.run_dir.name}/*")
    with pytest.raises(BucketUnavailableError):
        stage(
            replica.run.run_dir,
            listed.commit,
            replica.staging,
            max_rank=8,
            listing=listing,
            wait=replica.waited.append,
        )


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_a_read_that_fails_restarts_that_file_only(site: Site, number: int) -> None:
    trainer, replica = site.pair()
    digest = trainer.publish(7, trainer.save(7, hidden=BIG)).adapter.digest
    listed = replica.run.read(replica.run.keys()[0])
    site.replica.fail("read", number, pattern=f"*/{WEIGHTS}", skip=2, times=1)
    before = len(site.replica.calls("open"))
    assert replica.stage(listed).digest == digest
    opened = [Path(call.key).name for call in site.replica.calls("open")[before:]]
    assert opened == [CONFIG, WEIGHTS, WEIGHTS]
    assert replica.waited == [0.1]


def test_the_replicas_mount_dies(bucket: StrictBucket, site: Site) -> None:
    trainer, _ = site.pair()
    digest = trainer.publish(7).adapter.digest
    with bucket.mount("mortal", read_only=True) as host:
        run_dir = host.path / trainer.run_dir.name
        listing = Listing(run_dir)
        assert len(list_commits(run_dir, ATTEMPT, -1, listing=listing)) == 1
        host.kill()
        with pytest.raises(BucketUnavailableError, match="the mount is dead"):
            list_commits(run_dir, ATTEMPT, -1, listing=listing)
        host.remount()
        (key,) = list_commits(run_dir, ATTEMPT, -1, listing=listing)
        replica = Replica(replace(trainer, run_dir=run_dir), site.local / "mortal")
        assert replica.stage(replica.run.read(key)).digest == digest


def test_a_mount_that_remembers_absence_stalls_nobody(bucket: StrictBucket, site: Site) -> None:
    """A look at a missing path would cost its 30 s here; none is ever taken."""
    preset = replace(HF_LIKE, negative_ttl_s=30.0, visible_after_s=0.2)
    with (
        bucket.mount("hf-trainer", preset=preset) as here,
        bucket.mount("hf-replica", preset=preset, read_only=True) as there,
    ):
        trainer, _ = site.pair(here)
        replica = Replica(replace(trainer, run_dir=there.path / trainer.run_dir.name), site.local)
        for version in (1, 2):
            assert len(replica.run.keys()) == version - 1
            published = trainer.publish(version)
            while len(replica.run.keys()) < version:
                os.sched_yield()
            assert replica.take_newest() == published.adapter.digest
        assert replica.waited == []


# --- what it costs ---------------------------------------------------------------------------


def test_a_poll_is_two_listings(bucket: StrictBucket, site: Site) -> None:
    trainer, _ = site.pair()
    for version in (499, 500, 501):
        trainer.publish(version)
    with bucket.mount("poller", read_only=True) as host:
        run_dir = host.path / trainer.run_dir.name
        listing = Listing(run_dir)
        assert len(list_commits(run_dir, ATTEMPT, 498, listing=listing)) == 3
        host.remount()  # the kernel has forgotten all, as it has after a second
        assert len(list_commits(run_dir, ATTEMPT, 500, listing=listing)) == 1
        cost = host.counters()
        assert (cost.lookups, cost.listings) == (4, 2)  # one lookup for each part of the path
        assert (cost.head, cost.list, cost.get) == (3, 5, 0)


def test_an_adapter_is_one_read_a_file(bucket: StrictBucket, site: Site) -> None:
    trainer, _ = site.pair()
    before = site.trainer.counters()
    trainer.publish(7)
    assert site.trainer.counters().since(before).put == 3
    with bucket.mount("taker", read_only=True) as host:
        run = replace(trainer, run_dir=host.path / trainer.run_dir.name)
        assert Replica(run, site.local / "taker").take_newest()
        assert host.counters().get == 3
