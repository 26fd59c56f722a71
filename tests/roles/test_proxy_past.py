"""Runs that are over are shown from the bucket alone, and the bucket's failures cost nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from asyncgrpo_agent.config.sections import Bucket, Config, Role
from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.core.segments import encode, line_of
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.roles import proxy_past
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted
from asyncgrpo_agent.roles.proxy_past import KEPT, NotReadError, PastRuns, run_row, snapshot
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import mounted_at
from asyncgrpo_agent.store.segments import write_segment
from fakes import mount_s3
from fakes.histories import simulated
from fakes.strict_mount import StrictBucket

ATTEMPT = "a0001-5d9b"


def keep(bucket: Path, run: str, *, steps: int = 12) -> None:
    """The run's history, in two segments."""
    records = list(simulated(steps, resume_at=None))
    half = len(records) // 2
    for number, part in enumerate((records[:half], records[half:])):
        lines = [line for one in part if (line := line_of(one))]
        start = number * half
        data = encode(lines, history="h", start=start, end=start + half, run=run, attempt=ATTEMPT)
        write_segment(Listing(bucket / run), ATTEMPT, number, data)


@asynccontextmanager
async def serving(bucket: Path, live: set[str]) -> AsyncIterator[PastRuns]:
    past = PastRuns(Config(role="proxy", bucket=Bucket(path=str(bucket))), live)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(past.serve)
        yield past
        nursery.cancel_scope.cancel()


async def listed(past: PastRuns, *names: str) -> None:
    with trio.fail_after(20):
        while past.names != list(names):  # noqa: ASYNC110 - another process lists them
            await trio.sleep(0.01)


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


async def glanced(past: PastRuns) -> None:
    with trio.fail_after(20):
        while any(row["step"] is None for row in past.rows(lambda _name: True)):  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_run_that_is_over_is_read_from_its_bucket(tmp_path: Path) -> None:
    for name in ("old", "older", "here"):
        keep(tmp_path, name)
    async with serving(tmp_path, {"here"}) as past:
        await listed(past, "here", "old", "older")
        assert names(past.rows(lambda _name: True)) == ["old", "older"]
        assert names(past.rows(lambda name: name == "older")) == ["older"]
        assert run_row("old", None)["step"] is None
        await glanced(past)
        row = past.rows(lambda _name: True)[0]
        assert (row["step"], row["attempt"], row["verdict"]) == (12, ATTEMPT, None)
        assert row["reward"] == pytest.approx(0.05, abs=0.1)
        run = await past.find("old")
        assert run is not None
        assert run.story.step == 12
        row = past.rows(lambda _name: True)[0]
        assert (row["state"], row["attempt"], row["step"]) == ("past", ATTEMPT, 12)
        assert row["verdict"] is not None
        assert await past.find("old") is run
        assert await past.find("here") is None
        assert await past.find("../old") is None


async def test_few_runs_are_kept(tmp_path: Path) -> None:
    runs = [f"r{number}" for number in range(KEPT + 2)]
    for run in runs:
        keep(tmp_path, run, steps=3)
    async with serving(tmp_path, set()) as past:
        await listed(past, *runs)
        for run in runs:
            assert await past.find(run) is not None
        assert list(past._kept) == runs[-KEPT:]
        await glanced(past)


async def test_what_others_wrote_ends_nothing(tmp_path: Path) -> None:
    keep(tmp_path, "old")
    folder = tmp_path / "old" / "events" / ATTEMPT
    (folder / "000002.jsonl").write_bytes(b"\xff" * 1000)
    nonsense = '{"t":1,"kind":"metrics","step":1e999,"values":[]}\n{"kind":5}\n'
    head = '{"kind":"segment","history":"x","start":0,"end":1}\n'
    (folder / "000003.jsonl").write_text(head + nonsense)
    async with serving(tmp_path, set()) as past:
        await listed(past, "old")
        run = await past.find("old")
        assert run is not None
        assert run.story.step == 12


async def test_a_bucket_that_is_away_is_said_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_past, "FIRST_LOOKS_S", 0.05)
    bucket = tmp_path / "bucket"
    async with serving(bucket, set()) as past:
        await trio.sleep(0.3)
        assert past.names == []
        bucket.mkdir()
        keep(bucket, "old")
        await listed(past, "old")


async def test_a_run_that_cannot_be_read_now_is_asked_for_again(tmp_path: Path) -> None:
    bucket = StrictBucket(tmp_path / "s3")
    with bucket.mount("trainer") as writer, bucket.mount("proxy", read_only=True) as reader:
        keep(writer.path, "old")
        async with serving(reader.path, set()) as past:
            await listed(past, "old")
            reader.fail("read", 5, pattern="*events/*", times=1000)
            with pytest.raises(NotReadError, match="EIO"):
                await past.find("old")
            reader.release()
            assert await past.find("old") is not None


async def test_without_a_bucket_there_are_none(autojump_clock: trio.testing.MockClock) -> None:
    past = PastRuns(Config(role="proxy"), ())
    await past.serve()
    assert past.rows(lambda _name: True) == []
    assert await past.find("old") is None


def test_a_snapshot_is_as_that_of_a_run_that_is_live() -> None:
    run = Run(name="old")
    run.add_all(simulated(30, resume_at=None))
    shown = msgspec.to_builtins(snapshot("old", run))
    parts = "run verdict alerts replicas routing series_names facts seq syncs events"
    assert set(shown) == set(parts.split())
    assert shown["run"]["state"] == "past"
    assert shown["verdict"]["kind"] == "balanced"
    assert (len(shown["syncs"]), shown["syncs"][0]["version"]) == (30, 30)
    assert shown["facts"]["model"] == "Qwen2.5-1.5B-Instruct"
    assert shown["facts"]["max_staleness"] == 4
    assert shown["run"]["cost"] == pytest.approx(0.2945, abs=0.001)
    assert set(run_row("old", None)) == set(shown["run"])


# --- a bucket that the proxy mounts itself -----------------------------------------------------


def configured(store: mount_s3.Installed, role: Role, program: str = "") -> Config:
    folder = store.root.parent
    keys = {
        "bucket.url": "s3://data/runs",
        "bucket.mount_s3": program or str(store.program),
        "bucket.credentials_file": str(store.credentials),
        "agent.state_dir": f"{folder}/{role}",
    }
    if role == "trainer":
        keys |= {"model.path": "m", "link.join": "j"}
        keys |= {"train.dataset": "d.jsonl", "train.rewards": '["a:b"]'}
    settings = [Setting(path=path, value=value, origin="test") for path, value in keys.items()]
    return parse(role=role, cwd=folder, settings=settings)


@pytest.mark.slow
async def test_a_proxy_mounts_the_bucket_itself_and_only_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_past, "FIRST_LOOKS_S", 0.1)
    store = mount_s3.installed(tmp_path)
    store.make_bucket("data")
    trainer, proxy = configured(store, "trainer"), configured(store, "proxy")
    async with bucket_mounted(trainer):
        keep(Path(trainer.bucket.path), "old")
    past = PastRuns(proxy, ())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(past.serve)
        await listed(past, "old")
        assert await past.find("old") is not None
        found = mounted_at(Path(proxy.bucket.path))
        assert found is not None
        assert found.read_only
        nursery.cancel_scope.cancel()
    assert mounted_at(Path(proxy.bucket.path)) is None


@pytest.mark.slow
async def test_a_mount_that_cannot_be_had_ends_no_proxy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = mount_s3.installed(tmp_path)
    past = PastRuns(configured(store, "proxy", program=str(tmp_path / "none")), ())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(past.serve)
        with trio.fail_after(20):
            while "past_runs.unmounted" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
                await trio.sleep(0.01)
        assert past.names == []
        nursery.cancel_scope.cancel()
