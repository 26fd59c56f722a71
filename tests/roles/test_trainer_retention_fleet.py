"""Whole agents publish hundreds of versions, and everything that they use up stays bounded."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store import history
from fakes import fleet, hasty
from fakes.fleet import Site
from fakes.processes import children_naming, open_files, rss_mib
from fakes.strict_mount import Counters, Host, StrictBucket

NAMED_S = 1.5
HASTY = (f"core.retention.NAMED_S={NAMED_S}", "roles.trainer_retention.ROUND_S=0.25")
WINDOW = 5  # FakeTrl's
UNTIL_RETIRED = 1  # TRL loads one more before it unloads the oldest
MAX_LORAS = 8  # the default of engine.max_loras


@dataclass
class Stage:
    """A site whose bucket is a folder, or a mount for each of its hosts."""

    site: Site
    trainer_bucket: Path
    replica_buckets: list[Path]

    def start(self, steps: int, *more: str) -> tuple[fleet.Agent, list[fleet.Agent]]:
        self.proxy = self.site.proxy()
        replicas = [
            self.site.replica(f"r{number}", f"--bucket={bucket}")
            for number, bucket in enumerate(self.replica_buckets)
        ]
        trainer = self.site.trainer(
            steps,
            f"--bucket={self.trainer_bucket}",
            f"--min-replicas={len(replicas)}",
            "--set=train.fake_rollouts=2",
            *more,
            within=hasty.within(*HASTY),
        )
        return trainer, replicas

    def commits(self) -> dict[int, Path]:
        """By version, as far as they can be seen at this moment."""
        found = (self.replica_buckets[0] / "demo" / "commits").glob("*/*/*.toml")
        return {int(path.stem.removeprefix("v")): path for path in found}

    def staged(self) -> list[Path]:
        return list((self.site.folder / "r0" / "staged").glob("*/*"))


def on_site(folder: Path) -> AbstractContextManager[Site]:
    """Beside the mounts, for it waits until no process names its folder."""
    (folder / "site").mkdir()
    return fleet.site(folder / "site")


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Its parameter: the options of the trainer's mount, or None for a plain folder."""
    options = request.param
    with ExitStack() as stack:
        trainer = replica = tmp_path / "bucket"
        trainer.mkdir()
        if options is not None:
            bucket = StrictBucket(tmp_path / "s3")
            trainer = stack.enter_context(bucket.mount("trainer", **options)).path
            replica = stack.enter_context(bucket.mount("replica", read_only=True)).path
        site = stack.enter_context(on_site(tmp_path))
        yield Stage(site, trainer, [replica])


def names_in_vllm(replica: fleet.Agent) -> int:
    """The most names that it held at once."""
    held = most = 0
    for event in re.findall(r"adapter\.(loaded|unloaded) adapter", replica.text()):
        held += 1 if event == "loaded" else -1
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Removals:
    """What the trainer's history says of the versions that it published and removed."""

    published: list[float]  # when, by version
    rounds: list[tuple[float, float, int]]  # when each was planned and done; versions removed

    @staticmethod
    def of(site: Site) -> Removals:
        published, rounds = [], []
        for row in history.read(history_file(site.folder / "trainer", "demo")):
            if row["kind"] == "published":
                published.append(row["t"])
            elif row["kind"] == "pruned":
                rounds.append((row["t"] - row["seconds"], row["t"], row["versions"]))
        return Removals(published, rounds)

    def by(self, at: float) -> int:
        """How many were published by then."""
        return bisect_right(self.published, at)

    def most(self) -> int:
        """The most versions that there were at once."""
        removed, most = 0, 0
        for _, done, versions in self.rounds:
            most = max(most, self.by(done) - removed)
            removed += versions
        return max(most, len(self.published) - removed)

    def check(self) -> None:
        """Each round leaves what is live, and what was named a moment ago, however many came in
        that time: a version is named until its successor is published."""
        removed = 0
        for planned, done, versions in self.rounds:
            removed += versions
            named = self.by(done) - self.by(planned - NAMED_S) + 1
            assert self.by(done) - removed <= named + WINDOW + UNTIL_RETIRED


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, {"allow_delete": True}], indirect=True)
def test_two_hundred_versions_need_the_room_of_a_few(stage: Stage) -> None:
    trainer, (replica,) = stage.start(200)
    most_versions = most_staged = 0
    while trainer.process.poll() is None:
        seen = stage.commits()
        most_versions = max(most_versions, len(seen))
        most_staged = max(most_staged, len(stage.staged()))
        assert_live_is_there(stage, seen)
        time.sleep(0.1)  # noqa: TID251 - other processes have no virtual clock
    assert trainer.process.returncode == 0, trainer.text()
    counts = stage.site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 200)
    removals = Removals.of(stage.site)
    removals.check()
    assert len(removals.rounds) >= 2
    assert WINDOW <= most_versions <= removals.most() + 1  # one that is not recorded yet
    assert most_staged < 20
    assert names_in_vllm(replica) <= MAX_LORAS
    assert sorted(stage.commits()) == list(range(201 - WINDOW, 201))
    run_dir = stage.trainer_bucket / "demo"
    objects = [path for path in run_dir.rglob("*") if path.is_file()]
    objects = [path for path in objects if "events" not in path.relative_to(run_dir).parts]
    assert len(objects) == 3 * (WINDOW + 1)  # and the last step's, below final/
    assert replica.process.wait(20) == 0


def assert_live_is_there(stage: Stage, seen: dict[int, Path]) -> None:
    """What the newest commit names as live was listed with it; TRL has retired the oldest since."""
    if not seen:
        return
    try:
        text = seen[max(seen)].read_text()
    except FileNotFoundError:  # this process stood still; only what has a successor is removed
        assert max(stage.commits()) > max(seen)
        return
    names = re.findall(r'"(demo\.[^"]+)"', text.partition("live = ")[2].partition("]")[0])
    live = [parts.version for name in names if (parts := parse_name(name)) is not None]
    assert len(live) == len(names)
    assert set(live[1:]) <= set(seen)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"allow_delete": False}], indirect=True)
def test_a_bucket_that_forbids_deletion_only_grows(stage: Stage) -> None:
    trainer, _ = stage.start(30)
    assert trainer.process.wait(60) == 0, trainer.text()
    assert trainer.text().count("adapters.unprunable") == 1
    assert "--allow-delete" in trainer.text()
    assert "adapters.pruned" not in trainer.text()
    assert sorted(stage.commits()) == list(range(31))


@pytest.mark.slow
def test_a_slow_replica_takes_the_newest_in_place_of_what_was_pruned(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    with (
        bucket.mount("trainer", allow_delete=True) as mounted,
        bucket.mount("fast", read_only=True) as fast,
        bucket.mount("slow", read_only=True) as slow,
        on_site(tmp_path) as site,
    ):
        slow.hang("open", pattern="*.safetensors", skip=1)
        steps_s = "--set=train.fake_step_s=0.05"  # so slow that versions grow old before the end
        trainer, (_, late) = Stage(site, mounted.path, [fast.path, slow.path]).start(150, steps_s)
        slow.await_hung(60)
        (text,) = re.findall(r"adapter\.published adapter=\S+\.v(\d+)", trainer.text())[-1:]
        much_later = int(text) + 12
        trainer.wait_for(rf"adapter\.published adapter=\S+\.v{much_later:06d}")
        while any(f"/v{text}" in key for key in bucket.keys("demo/adapters")):
            assert trainer.process.poll() is None, trainer.text()
            time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock
        slow.release()
        late.wait_for("adapter.pruned")
        newer = "|".join(f"{version:06d}" for version in range(much_later, 151))
        late.wait_for(rf"adapter\.loaded adapter=\S+\.v({newer})")
        assert trainer.process.wait(60) == 0, trainer.text()
        counts = site.counts()
        assert (counts["failed"], counts["wrong_bytes"]) == (0, 0)


@pytest.mark.slow
def test_mirrors_hold_a_few_of_two_hundred_versions(tmp_path: Path) -> None:
    """Those of the proxy, and of a replica that gets its adapters over its link."""
    with on_site(tmp_path) as site:
        proxy_adapters = site.folder / "proxy" / "mirror" / "demo" / "adapters"
        site.proxy()
        replica = site.replica("r0", bucket=("--bucket-source=link",))
        trainer = site.trainer(200, within=hasty.within(*HASTY))
        stage = Stage(site, tmp_path, [])
        most_mirrored = most_received = most_staged = 0
        while trainer.process.poll() is None:
            most_mirrored = max(most_mirrored, len(list(proxy_adapters.glob("*/*"))))
            received = list((site.folder / "r0" / "mirror" / "demo" / "adapters").glob("*/*"))
            most_received = max(most_received, len(received))
            most_staged = max(most_staged, len(stage.staged()))
            time.sleep(0.05)  # noqa: TID251 - other processes have no virtual clock
        assert trainer.process.returncode == 0, trainer.text()
        counts = site.counts()
        assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 200)
        live_and_coming = WINDOW + UNTIL_RETIRED + 2
        assert WINDOW <= most_mirrored <= live_and_coming
        assert WINDOW <= most_received <= live_and_coming
        assert most_staged < 20
        assert names_in_vllm(replica) <= MAX_LORAS


# --- a thousand versions ---------------------------------------------------------------------

FIRST, LAST = 200, 980  # versions at which the two are compared
GROWTH_MIB = 6.0  # an allocator's; what is kept for each version would be seen 780 times
MORE_REQUESTS = 1.2  # a version that needed a second try costs some
COMMITS = "demo/commits/"
ATTEMPT_RE = re.compile(r"demo/commits/a\d+-[0-9a-f]{4}")


@dataclass(frozen=True)
class Mark:
    """What a fleet uses up at one moment; processes by name."""

    version: int
    rss_mib: dict[str, float]
    open_files: dict[str, int]
    objects: int
    staged: int
    requests: Counters
    looks: int
    listed: int  # folders of commits

    def listings_a_look(self, before: Mark) -> float:
        """Of the replica's for each of its looks for new commits, since an earlier mark."""
        return (self.listed - before.listed) / (self.looks - before.looks)

    def requests_a_version(self, before: Mark) -> float:
        """All that S3 sees of the replica."""
        made = self.requests.since(before.requests)
        return (made.head + made.list + made.get) / (self.version - before.version)


@dataclass
class Watched:
    """The fleet, its bucket, and its processes."""

    stage: Stage
    bucket: StrictBucket
    mounted: Host
    agents: dict[str, fleet.Agent]

    def mark(self, version: int) -> Mark:
        pids = {name: agent.process.pid for name, agent in self.agents.items()}
        for name in ("trainer", "replica"):
            (pids[f"{name}'s bucket"],) = children_naming(pids[name], "mount-worker")
        listed = [call.key for call in self.mounted.calls("readdir")]
        return Mark(
            version=version,
            rss_mib={name: rss_mib(pid) for name, pid in pids.items()},
            open_files={name: open_files(pid) for name, pid in pids.items()},
            objects=len(adapter_keys(self.bucket)),
            staged=len(self.stage.staged()),
            requests=self.mounted.counters(),
            looks=sum(ATTEMPT_RE.fullmatch(key) is not None for key in listed),
            listed=sum(key.startswith(COMMITS) for key in listed),
        )

    def mark_at(self, version: int) -> Mark:
        newest = re.compile(r"adapter\.published adapter=\S+\.v(\d+)")
        trainer = self.agents["trainer"]
        while True:
            text = trainer.text()[-20_000:]
            found = newest.findall(text)
            if found and int(found[-1]) >= version:
                return self.mark(int(found[-1]))
            assert trainer.process.poll() is None, text
            time.sleep(0.02)  # noqa: TID251 - other processes have no virtual clock


def adapter_keys(bucket: StrictBucket) -> list[str]:
    """All but the run's history, which grows by an object a minute."""
    return [key for key in bucket.keys("demo") if "/events/" not in f"/{key}"]


@pytest.mark.deep
@pytest.mark.parametrize("allow_delete", [True, False])
def test_a_thousand_versions_use_up_no_more_than_two_hundred(
    tmp_path: Path, *, allow_delete: bool
) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    with (
        bucket.mount("trainer", allow_delete=allow_delete) as trainers,
        bucket.mount("replica", read_only=True) as replicas,
        on_site(tmp_path) as site,
    ):
        stage = Stage(site, trainers.path, [replicas.path])
        trainer, (replica,) = stage.start(1000, "--set=train.fake_rollouts=1")
        agents = {"trainer": trainer, "replica": replica, "proxy": stage.proxy}
        watched = Watched(stage, bucket, replicas, agents)
        start, first, last = (watched.mark_at(version) for version in (20, FIRST, LAST))
        assert trainer.process.wait(60) == 0, trainer.text()[-5000:]
        counts = site.counts()
        assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 1000)
        print(start, first, last, sep="\n")  # noqa: T201 - shown by pytest -s
        if allow_delete:
            removals = Removals.of(site)
            removals.check()
            assert last.objects <= 3 * (removals.most() + 1)
            assert len(adapter_keys(bucket)) == 3 * (WINDOW + 1)  # and final/
        else:
            assert len(adapter_keys(bucket)) == 3 * (1001 + 1)
        assert_bounded(start, first, last)
        assert names_in_vllm(replica) <= MAX_LORAS


def assert_bounded(start: Mark, first: Mark, last: Mark) -> None:
    for name, mib in last.rss_mib.items():
        assert mib < first.rss_mib[name] + GROWTH_MIB, name
    for name, number in last.open_files.items():
        assert number <= first.open_files[name] + 3, name  # connections that come and go
    assert last.staged < 20
    assert last.listings_a_look(first) < 2.02  # three for one that shows the first of a folder
    before, after = first.requests_a_version(start), last.requests_a_version(first)
    print(f"{before:.1f} and {after:.1f} requests a version")  # noqa: T201
    assert after < MORE_REQUESTS * before
