"""What a run has ended with is in the bucket, or its trainer says why not."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Train, Trainer
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import BucketUnavailableError
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_result import RunResult
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store.bucket import list_results
from asyncgrpo_agent.store.history import read
from asyncgrpo_agent.store.listing import Listing
from fakes import fleet
from fakes.adapters import write_adapter
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY
from fakes.fleet import Site
from fakes.strict_mount import StrictBucket


@dataclass
class World:
    result: RunResult
    run_dir: Path
    records: list[dict[str, object]] = field(default_factory=list)

    def keys(self) -> list[str]:
        return list_results(Listing(self.run_dir))


@asynccontextmanager
async def world(folder: Path, bucket: Path, **trainer: Any) -> AsyncIterator[World]:
    join = Join(
        addresses=(),
        ca_der=b"",
        token="",
        role="trainer",
        run="run",
        run_public_key=PUBLIC_KEY,
        run_private_key=PRIVATE_KEY,
    )
    config = Config(
        role="trainer",
        bucket=Bucket(path=str(bucket)),
        trainer=Trainer(**trainer),
        train=Train(output_dir=str(folder / "output")),
    )
    link = TrainerLink(join, "i", "host", Random(1), print, trio.sleep_forever, print)
    link.attempt = ATTEMPT
    records: list[dict[str, object]] = []

    def record(kind: str, **fields: object) -> None:
        records.append({"kind": kind, **fields})

    async with BucketHost(str(bucket), "run", Agent()).running() as host:
        result = RunResult(config, join, link, host, Turns(), "ab" * 32, record, Random(1), step=50)
        yield World(result, bucket / "run", records)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


async def test_it_is_copied_once(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path, bucket) as made:
        await made.result.publish()
        assert made.keys() == []  # TRL has left none
        write_adapter(made.result.folder)
        await made.result.publish()
        (key,) = made.keys()
        assert key == f"final/{ATTEMPT}/s000050.toml"
        assert [record["kind"] for record in made.records] == ["result"]
        made.result.link.attempt = "a0002-0000"  # the ended run is started once more
        await made.result.publish()
        assert made.keys() == [key]


async def test_another_result_or_an_unreadable_one_is_followed_by_a_new_one(
    tmp_path: Path, bucket: Path
) -> None:
    async with world(tmp_path, bucket) as made:
        write_adapter(made.result.folder, seed=1)
        await made.result.publish()
        (bucket / "run" / made.keys()[0]).write_bytes(b"forged")
        made.result.link.attempt = "a0002-0000"
        await made.result.publish()
        shutil.rmtree(made.result.folder)
        write_adapter(made.result.folder, seed=2)
        made.result.step = 60
        await made.result.publish()
        assert made.keys()[:2] == [f"final/a0002-0000/s0000{step}.toml" for step in (60, 50)]


async def test_a_bucket_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer") as mounted:
        async with world(tmp_path, mounted.path, mirror_s=1.0) as made:
            write_adapter(made.result.folder)
            mounted.fail("write", 5, pattern="*final/*", times=1000)
            with pytest.raises(
                BucketUnavailableError, match="its result is not in the bucket"
            ) as e:
                await made.result.publish()
            assert str(made.result.folder) in str(e.value)
            assert "start the trainer again" in str(e.value)
            mounted.release()
            await made.result.publish()
            assert len(made.keys()) == 1


# --- whole roles -----------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


def history(site: Site, host: str, kind: str) -> list[dict[str, Any]]:
    path = site.folder / host / "trainer" / "demo" / "history.jsonl"
    return [record for record in read(path) if record["kind"] == kind]


@pytest.mark.slow
def test_a_run_that_ends_leaves_its_result(site: Site, tmp_path: Path) -> None:
    site.proxy()
    replica = site.replica("r0")
    trainer = site.trainer(6, "--set=train.save_steps=3")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert replica.process.wait(20) == 0
    (record,) = history(site, "trainer", "result")
    assert record["step"] == 6
    folder = site.folder / "bucket" / "demo" / record["folder"]
    saved = site.folder / "trainer" / "output" / "demo" / "final"
    for path in folder.iterdir():
        assert path.read_bytes() == (saved / path.name).read_bytes()
    # A start on another host, which has to bring the result itself.
    shutil.rmtree(site.folder / "bucket" / "demo" / "final")
    again = site.trainer(6, "--set=train.save_steps=3", f"--state-dir={tmp_path / 'other'}")
    assert again.process.wait(60) == 0, again.text()
    assert "child.started child=train" not in again.text()
    (key,) = list_results(Listing(site.folder / "bucket" / "demo"))
    assert key.startswith("final/a0002-")
    assert key.endswith("/s000006.toml")
    site.hosts.command(
        *("adapters", "get", "demo", "home", "--version=final", "--join=replica.join"),
        f"--bucket={site.folder / 'bucket'}",
    )
    name = "adapter_model.safetensors"
    assert (site.folder / "home" / name).read_bytes() == (saved / name).read_bytes()
