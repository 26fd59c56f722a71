"""A run outlives its trainer: the next start goes on, on the same host or another one."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Train
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import BucketUnavailableError, ConfigError
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_resume import Resumption, settings_of
from asyncgrpo_agent.store import last_start
from asyncgrpo_agent.store.checkpoints import SavedCheckpoint, publish_checkpoint
from asyncgrpo_agent.store.history import read
from asyncgrpo_agent.store.last_start import LastStart
from fakes import fleet
from fakes.bucket import PRIVATE_KEY, PUBLIC_KEY
from fakes.checkpoints import begin_checkpoint, save_checkpoint
from fakes.fleet import Site
from fakes.strict_mount import StrictBucket

MODEL = "ab" * 32


@dataclass
class World:
    """A host's disk, and a bucket with what other hosts left there."""

    folder: Path
    bucket: Path
    host: BucketHost

    def config(self, *, lora: dict[str, Any] | None = None, max_steps: int = 100) -> Config:
        return Config(
            role="trainer",
            agent=Agent(state_dir=str(self.folder / "state")),
            bucket=Bucket(path=str(self.bucket)),
            train=Train(
                output_dir=str(self.folder / "output"),
                passthrough={"max_steps": max_steps},
                lora=lora or {"r": 8},
            ),
        )

    def resumption(self, config: Config | None = None, digest: str = MODEL) -> Resumption:
        join = Join(
            addresses=(), ca_der=b"", token="", role="trainer", run="run", run_public_key=PUBLIC_KEY
        )
        return Resumption(config or self.config(), join, self.host, digest)

    @property
    def output(self) -> Path:
        return self.folder / "output" / "run"

    def in_bucket(self, attempt: int, step: int) -> str:
        saved = SavedCheckpoint(
            local_dir=save_checkpoint(self.folder / f"elsewhere-{attempt}", step),
            run="run",
            attempt=f"a{attempt:04d}-7f3c",
            step=step,
            base_model="tiny",
            base_model_digest=MODEL,
            private_key=PRIVATE_KEY,
            now_unix_s=1.0,
            settings=settings_of(self.config()),
        )
        return publish_checkpoint(saved, self.bucket / "run").key

    def started(self, attempt: int) -> None:
        start = LastStart(
            attempt_number=attempt,
            base_model_digest=MODEL,
            settings=settings_of(self.config()),
        )
        last_start.write(self.folder / "state" / "trainer" / "run", start)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.output.iterdir())


@asynccontextmanager
async def made(folder: Path, bucket: Path) -> AsyncIterator[World]:
    async with BucketHost(str(bucket), "run", Agent()).running() as host:
        yield World(folder, bucket, host)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "bucket").mkdir()
    async with made(tmp_path, tmp_path / "bucket") as one:
        yield one


async def test_a_new_run_begins_at_the_beginning(world: World) -> None:
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.folder, resumed.finished) == (0, None, False)


async def test_an_empty_host_takes_the_newest_of_the_bucket(world: World) -> None:
    for attempt, step in ((1, 10), (1, 40), (2, 20)):
        world.in_bucket(attempt, step)
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.source, resumed.is_mirrored) == (20, "bucket", True)
    assert resumed.folder == world.output / "checkpoint-20"
    source = world.folder / "elsewhere-2" / "checkpoint-20"
    for path in source.iterdir():
        assert (resumed.folder / path.name).read_bytes() == path.read_bytes()


async def test_what_this_host_has_beyond_the_bucket_is_not_lost(world: World) -> None:
    world.in_bucket(1, 10)
    world.started(1)
    save_checkpoint(world.output, 10)
    save_checkpoint(world.output, 20)
    begin_checkpoint(world.output, 30)
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.source, resumed.is_mirrored) == (20, "host", False)
    kept, torn = world.names()[1:], world.names()[0]
    assert kept == ["checkpoint-10", "checkpoint-20"]
    assert torn.startswith("abandoned-checkpoint-30-")


async def test_a_branch_that_another_host_has_left_behind_is_set_aside(world: World) -> None:
    world.started(1)
    save_checkpoint(world.output, 20)
    save_checkpoint(world.output, 40)
    world.in_bucket(2, 20)
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.source) == (20, "bucket")
    names = world.names()
    assert names[-1] == "checkpoint-20"
    assert [name.rpartition("-")[0] for name in names[:-1]] == [
        "abandoned-checkpoint-20",
        "abandoned-checkpoint-40",
    ]


async def test_corrupt_and_cut_ones_give_way_to_older_ones(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    good, corrupt, cut = (world.in_bucket(1, step) for step in (10, 20, 30))
    manifest = world.bucket / "run" / cut
    manifest.write_bytes(manifest.read_bytes()[:-1])
    data = world.bucket / "run" / corrupt.removesuffix(".toml") / "optimizer.pt"
    data.write_bytes(bytes(data.stat().st_size))
    resumed = await world.resumption().prepare()
    assert resumed.step == 10
    assert [r.message for r in caplog.records].count("checkpoint.refused") == 2
    assert good.endswith("s000010.toml")
    assert world.names() == ["checkpoint-10"]


async def test_a_corrupt_one_costs_nothing_that_is_on_this_host(world: World) -> None:
    world.started(1)
    save_checkpoint(world.output, 40)
    corrupt = world.in_bucket(2, 20)
    data = world.bucket / "run" / corrupt.removesuffix(".toml") / "optimizer.pt"
    data.write_bytes(bytes(data.stat().st_size))
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.source) == (40, "host")
    assert resumed.folder is not None
    assert (resumed.folder / "trainer_state.json").is_file()
    assert world.names() == ["checkpoint-40"]


async def test_the_result_of_a_shorter_run_makes_room(world: World) -> None:
    world.in_bucket(1, 100)
    await world.resumption().prepare()
    assert (await world.resumption().prepare()).finished
    assert [name for name in world.names() if "final" in name] == ["final"]
    weights = world.output / "final" / "adapter_model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(b"of an earlier step")
    await world.resumption().prepare()
    assert weights.read_bytes() == right
    assert any(name.startswith("abandoned-final-") for name in world.names())


async def test_a_bucket_that_does_not_answer_ends_the_start(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    with bucket.mount("trainer") as mounted:
        async with made(tmp_path, mounted.path) as world:
            world.in_bucket(1, 10)
            mounted.fail("open", 5, pattern="*.toml", times=1000)
            with pytest.raises(BucketUnavailableError):
                await world.resumption().prepare()


async def test_another_model_or_adapter_needs_another_name(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.in_bucket(1, 10)
    with pytest.raises(ConfigError, match=r"train\.lora\.r: 8 -> 16"):
        await world.resumption(world.config(lora={"r": 16})).prepare()
    with pytest.raises(ConfigError, match="another model"):
        await world.resumption(digest="cd" * 32).prepare()
    with caplog.at_level("INFO"):
        assert (await world.resumption(world.config(max_steps=200)).prepare()).step == 10
    (changed,) = [vars(r) for r in caplog.records if r.message == "run.changed"]
    assert "train.max_steps" in str(changed)


async def test_the_same_holds_for_what_is_on_this_host(world: World) -> None:
    world.started(1)
    save_checkpoint(world.output, 20)
    with pytest.raises(ConfigError, match=r"train\.lora\.r: 8 -> 16"):
        await world.resumption(world.config(lora={"r": 16})).prepare()


async def test_a_run_that_has_ended_leaves_its_result_on_any_host(world: World) -> None:
    world.in_bucket(1, 100)
    resumed = await world.resumption().prepare()
    assert (resumed.step, resumed.finished) == (100, True)
    final, last = world.output / "final", world.output / "checkpoint-100"
    assert sorted(path.name for path in final.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for path in final.iterdir():
        assert path.read_bytes() == (last / path.name).read_bytes()
    assert not (await world.resumption(world.config(max_steps=101)).prepare()).finished


# --- whole roles -----------------------------------------------------------------------------

STEPS = 60


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def start(site: Site, host: str, *more: str, steps: int = STEPS) -> fleet.Agent:
    return site.trainer(
        steps,
        "--set=train.save_steps=5",
        "--set=train.fake_step_s=0.1",
        f"--state-dir={site.folder / host}",
        *more,
    )


def trained(site: Site, *hosts: str) -> list[int]:
    """Steps in the order in which they were trained."""
    files = [site.folder / host / "output" / "demo" / "steps.txt" for host in hosts]
    return [int(line) for path in files for line in path.read_text().split()]


def kinds(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    history = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(history) if record["kind"] == kind]


@pytest.mark.slow
def test_a_trainer_that_dies_is_continued_on_another_host(site: Site) -> None:
    site.proxy()
    replica = site.replica("r0")
    first = start(site, "one", "--set=trainer.quorum=1.0")
    first.wait_for(r"checkpoint\.mirrored")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(10)
    second = start(site, "two")
    second.wait_for(r"run\.resumed step=\d+ source=bucket")
    assert second.process.wait(60) == 0, second.text()
    assert replica.process.wait(20) == 0
    (resumed,) = kinds(site, "two", "resumed")
    assert resumed["step"] < STEPS, first.text()
    steps = trained(site, "one", "two")
    again = [step for step, times in Counter(steps).items() if times > 1]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert all(step > resumed["step"] for step in again)
    counts = fleet.counts(site.folder / "two" / "output" / "demo")
    assert (counts["failed"], counts["wrong_bytes"]) == (0, 0)
    assert replica.text().count("child.started child=vllm") == 1


@pytest.mark.slow
def test_a_run_that_has_ended_starts_no_training(site: Site) -> None:
    site.proxy()
    site.replica("r0")
    assert start(site, "one", steps=10).process.wait(60) == 0
    again = start(site, "two", steps=10)
    assert again.process.wait(60) == 0, again.text()
    assert "run.finished step=10" in again.text()
    assert "child.started child=train" not in again.text()
    more = start(site, "two", steps=12)
    more.wait_for("replicas.awaited")
    site.replica("r1")
    assert more.process.wait(60) == 0, more.text()
    assert trained(site, "one", "two") == list(range(1, 13))


@pytest.mark.slow
def test_another_shape_of_the_adapter_is_a_matter_of_configuration(site: Site) -> None:
    site.proxy()
    site.replica("r0")
    assert start(site, "one", steps=5).process.wait(60) == 0
    other = start(site, "one", "--set=train.lora.r=4", steps=10)
    assert other.process.wait(60) == 78, other.text()
    assert "train.lora.r: unset -> 4" in other.text()
