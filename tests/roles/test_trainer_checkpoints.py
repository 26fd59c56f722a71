"""TRL's newest checkpoint is in the bucket, and adapters never wait long for it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Train, Trainer
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.roles import trainer_checkpoints
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_checkpoints import Checkpoints
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store.checkpoints import list_checkpoints, read_checkpoint, restore
from asyncgrpo_agent.store.history import read
from asyncgrpo_agent.store.listing import Listing
from fakes import fleet, hasty
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY
from fakes.checkpoints import begin_checkpoint, finish_checkpoint, save_checkpoint
from fakes.fleet import Site
from fakes.strict_mount import Host, StrictBucket


@dataclass
class World:
    """What TRL has on disk, and what becomes of it."""

    output: Path
    run_dir: Path
    checkpoints: Checkpoints
    turns: Turns
    records: list[dict[str, object]] = field(default_factory=list)

    def steps(self) -> list[int]:
        return [key.step for key in list_checkpoints(Listing(self.run_dir)).get(ATTEMPT, [])]

    async def until(self, step: int) -> None:
        with trio.fail_after(10):
            while not self.records or self.records[-1]["step"] != step:  # noqa: ASYNC110
                await trio.sleep(0.01)


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

    turns = Turns()
    async with BucketHost(str(bucket), "run", Agent()).running() as host:
        checkpoints = Checkpoints(config, join, link, host, turns, "ab" * 32, record)
        yield World(folder / "output" / "run", bucket / "run", checkpoints, turns, records)
        await checkpoints.finish()
        await host.list_attempts()  # its worker is free, and ends with it


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_checkpoints, "POLL_S", 0.02)
    monkeypatch.setattr(trainer_checkpoints, "QUIET_S", 0.2)
    monkeypatch.setattr(trainer_checkpoints, "RETRY_S", 0.05)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.mark.usefixtures("hurry")
async def test_the_newest_is_copied_and_the_oldest_go(
    tmp_path: Path, bucket: Path, nursery: trio.Nursery
) -> None:
    async with world(tmp_path, bucket) as made:
        nursery.start_soon(made.checkpoints.run)
        for step in (10, 20, 30):
            folder = begin_checkpoint(made.output, step)
            await trio.sleep(0.1)
            finish_checkpoint(folder, step)
            await made.until(step)
            assert made.records[-1]["kind"] == "checkpoint"
        await made.checkpoints.finish()
        assert made.steps() == [20, 30]
        assert len(made.records) == 3


@pytest.mark.usefixtures("hurry")
async def test_one_that_is_still_written_to_waits(
    tmp_path: Path, bucket: Path, nursery: trio.Nursery
) -> None:
    async with world(tmp_path, bucket) as made:
        nursery.start_soon(made.checkpoints.run)
        folder = save_checkpoint(made.output, 10)
        for number in range(6):
            (folder / f"rng_state_{number}.pth").touch()
            await trio.sleep(0.1)
            assert made.steps() == []
        made.checkpoints.trl_step = 11
        await made.until(10)


@pytest.mark.usefixtures("hurry")
async def test_a_newest_one_that_is_never_still_does_not_keep_the_older_ones(
    tmp_path: Path, bucket: Path, nursery: trio.Nursery
) -> None:
    async with world(tmp_path, bucket) as made:
        save_checkpoint(made.output, 10)
        folder = save_checkpoint(made.output, 20)
        made.checkpoints.trl_step = 20
        nursery.start_soon(made.checkpoints.run)
        for number in range(100):
            (folder / f"rng_state_{number}.pth").touch()
            await trio.sleep(0.05)
            if made.records:
                break
        assert [record["step"] for record in made.records] == [10]
        made.checkpoints.trl_step = 21
        await made.until(20)


async def test_what_was_there_before_is_left_alone(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path, bucket) as made:
        save_checkpoint(made.output, 400)
        made.checkpoints.leave_earlier_ones()
        await made.checkpoints.finish()
        assert made.steps() == []
        save_checkpoint(made.output, 5)
        await made.checkpoints.finish()
        assert made.steps() == [5]


async def test_nothing_is_copied_where_none_is_kept(tmp_path: Path, bucket: Path) -> None:
    async with world(tmp_path, bucket, keep_checkpoints=0) as made:
        save_checkpoint(made.output, 5)
        await made.checkpoints.run()
        await made.checkpoints.finish()
        assert made.steps() == []


@pytest.mark.usefixtures("hurry")
async def test_the_end_goes_on_with_what_was_begun(
    tmp_path: Path, bucket: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_checkpoints, "SLICE_S", 0.0)
    async with world(tmp_path, bucket) as made:
        save_checkpoint(made.output, 10, 20 << 20)
        nursery.start_soon(made.checkpoints.run)
        with trio.fail_after(10):
            while not (made.run_dir / "checkpoints").exists():  # noqa: ASYNC110
                await trio.sleep(0.001)
        await made.checkpoints.finish()
        folders = sorted(path.name for path in (made.run_dir / "checkpoints" / ATTEMPT).iterdir())
        assert folders == ["s000010", "s000010.toml"]


@pytest.mark.usefixtures("hurry")
async def test_a_publication_goes_first(
    tmp_path: Path, bucket: Path, nursery: trio.Nursery
) -> None:
    async with world(tmp_path, bucket) as made:
        save_checkpoint(made.output, 10)
        with made.turns.publishing():
            nursery.start_soon(made.checkpoints.run)
            await trio.sleep(0.5)
            assert made.steps() == []
        await made.until(10)


@pytest.mark.usefixtures("hurry")
async def test_trouble_is_left_to_another_time_and_leaves_no_remains(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    store = StrictBucket(tmp_path / "s3")
    with store.mount("trainer", allow_delete=True) as mounted:
        async with world(tmp_path, mounted.path, keep_checkpoints=1) as made:
            mounted.fail("write", 5, pattern="*optimizer.pt")
            nursery.start_soon(made.checkpoints.run)
            save_checkpoint(made.output, 10)
            with trio.fail_after(10):
                while not made.checkpoints._copying:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            await trio.sleep(0.3)
            mounted.release()
            save_checkpoint(made.output, 20)
            await made.until(20)
            await made.checkpoints.finish()
        assert {key.split("/")[3].partition(".")[0] for key in store.keys()}  # noqa: SIM118 == {"s000020"}


async def test_the_end_does_not_wait_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StrictBucket(tmp_path / "s3").mount("trainer", latency_s={"write": 0.1}) as mounted:
        async with world(tmp_path, mounted.path, mirror_s=0.5) as made:
            save_checkpoint(made.output, 10, 4 << 20)
            began = trio.current_time()
            with trio.CancelScope() as stopped:
                stopped.cancel()
                await made.checkpoints.finish()
            assert 0.5 <= trio.current_time() - began < 1.5
            assert made.steps() == []
            assert "checkpoint.unmirrored" in [record.message for record in caplog.records]
            await made.checkpoints.bucket.list_attempts()


# --- whole roles -----------------------------------------------------------------------------

HASTY = ("roles.trainer_checkpoints.POLL_S=0.2", "roles.trainer_checkpoints.QUIET_S=0.4")
SAVING = ("--set=train.fake_rollouts=2", "--set=train.save_steps=5")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "site").mkdir()
    with fleet.site(tmp_path / "site") as made:
        yield made


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Host]:
    bucket = StrictBucket(tmp_path / "s3")
    with bucket.mount("trainer", allow_delete=True, latency_s={"write": 0.1}) as host:
        yield host


def restored(site: Site, bucket: Path, folder: Path) -> int:
    """The step of the newest checkpoint, which holds what TRL had saved."""
    run_dir = bucket / "demo"
    newest = max(key for keys in list_checkpoints(Listing(run_dir)).values() for key in keys)
    public_key = decode((site.folder / "replica.join").read_text()).run_public_key
    checkpoint = read_checkpoint(run_dir, newest, run="demo", public_key=public_key)
    restore(run_dir, checkpoint, folder)
    saved = output(site) / f"checkpoint-{newest.step}"
    names = sorted(path.name for path in saved.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all((folder / name).read_bytes() == (saved / name).read_bytes() for name in names)
    return newest.step


def output(site: Site) -> Path:
    return site.folder / "trainer" / "output" / "demo"


def history(site: Site) -> list[dict[str, Any]]:
    return list(read(site.folder / "trainer" / "trainer" / "demo" / "history.jsonl"))


@pytest.mark.slow
def test_a_run_leaves_its_last_checkpoints_in_the_bucket(site: Site, tmp_path: Path) -> None:
    site.proxy()
    site.replica("r1")
    trainer = site.trainer(40, *SAVING, within=hasty.within(*HASTY))
    assert trainer.process.wait(60) == 0, trainer.text()
    assert restored(site, site.folder / "bucket", tmp_path / "restored") == 40
    keys = list_checkpoints(Listing(site.folder / "bucket" / "demo"))
    assert [len(found) for found in keys.values()] == [2]
    rows = [row for row in history(site) if row["kind"] == "checkpoint"]
    assert rows[-1]["step"] == 40
    assert rows[-1]["bytes"] > 1000
    assert trainer.text().count("checkpoint.mirrored") == len(rows) >= 2


@pytest.mark.slow
def test_a_signal_waits_for_the_newest_one(site: Site, tmp_path: Path) -> None:
    site.proxy()
    site.replica("r1")
    trainer = site.trainer(10_000, *SAVING, "--set=train.fake_save_bytes=30000000")
    trainer.wait_for("checkpoint.mirrored")
    assert trainer.end(signal.SIGTERM) == 0, trainer.text()
    folders = [path for path in output(site).iterdir() if (path / "trainer_state.json").exists()]
    last = max(int(path.name.removeprefix("checkpoint-")) for path in folders)
    assert restored(site, site.folder / "bucket", tmp_path / "restored") == last


@pytest.mark.slow
def test_a_notice_of_the_platform_is_as_good_as_a_signal(site: Site, tmp_path: Path) -> None:
    site.proxy()
    replica = site.replica("r1")
    notice = tmp_path / "notice"
    trainer = site.trainer(
        10_000,
        *SAVING,
        f'--set=trainer.notice_command=["test", "-e", "{notice}"]',
        "--set=trainer.notice_every_s=1",
    )
    trainer.wait_for("checkpoint.mirrored")
    notice.touch()
    assert trainer.process.wait(30) == 0, trainer.text()
    assert "trainer.noticed" in trainer.text()
    assert "child=notice_command" not in trainer.text()
    assert replica.process.poll() is None  # the run is not over
    assert history(site)[-1]["reason"] == "stopped by SIGTERM"


@pytest.mark.slow
def test_adapters_are_published_while_a_large_one_is_copied(
    site: Site, mounted: Host, tmp_path: Path
) -> None:
    site.proxy()
    site.replica("r1", f"--bucket={mounted.path}")
    trainer = site.trainer(
        40,
        "--set=train.fake_rollouts=2",
        "--set=train.save_steps=20",
        "--set=train.fake_save_bytes=60000000",
        f"--bucket={mounted.path}",
        within=hasty.within(*HASTY),
    )
    assert trainer.process.wait(90) == 0, trainer.text()
    assert restored(site, mounted.path, tmp_path / "restored") == 40
    copied = next(row for row in history(site) if row["kind"] == "checkpoint")
    assert copied["seconds"] > 2
    began = copied["t"] - copied["seconds"]
    syncs = [
        row for row in history(site) if row["kind"] == "sync" and began < row["t"] < copied["t"]
    ]
    assert len(syncs) >= 5
    assert max(row["seconds"] for row in syncs) < 3


@pytest.mark.deep
def test_a_bucket_slower_than_training_holds_nothing_up(
    site: Site, mounted: Host, tmp_path: Path
) -> None:
    """Checkpoints come faster than they can be copied: all but the newest are skipped."""
    site.proxy()
    site.replica("r1", f"--bucket={mounted.path}")
    trainer = site.trainer(
        40,
        "--set=train.fake_rollouts=2",
        "--set=train.fake_step_s=0.2",
        "--set=train.save_steps=2",
        "--set=train.fake_save_bytes=20000000",
        f"--bucket={mounted.path}",
        within=hasty.within(*HASTY),
    )
    assert trainer.process.wait(90) == 0, trainer.text()
    rows = history(site)
    copied = [row for row in rows if row["kind"] == "checkpoint"]
    assert 2 <= len(copied) < 15  # of 20
    assert restored(site, mounted.path, tmp_path / "restored") == 40
    ended = [row["t"] for row in rows if row["kind"] == "metrics"]
    steps_s = [after - before for before, after in pairwise(ended)]
    assert max(steps_s) < 3  # a slice of a copy, the write that it ends with, and a sync
    assert "checkpoint.unmirrored" not in trainer.text()
