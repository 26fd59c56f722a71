"""A run's history, put together again from the host's file or from the bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from asyncgrpo_agent.config.sections import Bucket, Config
from asyncgrpo_agent.core.segments import KINDS, encode, line_of
from asyncgrpo_agent.errors import AgentError, BucketUnavailableError
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.roles import history_source
from asyncgrpo_agent.store import segments as store
from asyncgrpo_agent.store.history import History
from asyncgrpo_agent.store.listing import Listing
from fakes import fleet
from fakes.histories import simulated

ATTEMPT = "a0001-7f3c"


def config(bucket: Path) -> Config:
    return Config(role="proxy", bucket=Bucket(path=str(bucket)))


def write_segments(bucket: Path, *, run: str, records: list[dict[str, Any]], many: int) -> None:
    for number, first in enumerate(range(0, len(records), many)):
        lines = [line for one in records[first : first + many] if (line := line_of(one))]
        data = encode(lines, history="h", start=first, end=first + many, run=run, attempt=ATTEMPT)
        store.write_segment(Listing(bucket / run), ATTEMPT, number, data)


async def test_the_bucket_has_every_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = list(simulated(20, resume_at=None))
    write_segments(tmp_path, run="demo", records=records, many=17)
    folder = tmp_path / "demo" / "events" / ATTEMPT
    (folder / "000002-r1.jsonl").write_bytes((folder / "000002.jsonl").read_bytes())
    (folder / "000002.jsonl").write_bytes((folder / "000002.jsonl").read_bytes()[:700])
    (folder / "000003-r1.jsonl").write_bytes(b"\xff" * 100)
    found: list[Any] = []
    await history_source.fold_bucket(config(tmp_path), "demo", found.append)
    assert found == records
    assert await history_source.recorded_runs(config(tmp_path)) == ["demo"]


async def test_a_run_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    found: list[Any] = []
    await history_source.fold_bucket(config(tmp_path), "other", found.append)
    assert found == []


async def test_a_bucket_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((AgentError, BucketUnavailableError)):
        await history_source.recorded_runs(config(tmp_path / "none"))


def test_this_host_has_runs_of_its_own(tmp_path: Path) -> None:
    assert history_source.local_runs(tmp_path) == []
    path = tmp_path / "trainer" / "demo" / "history.jsonl"
    with History(path) as history:
        history.record("phase", 1.0, phase="training")
    assert history_source.local_runs(tmp_path) == ["demo"]
    assert history_source.local_history(tmp_path, "demo") == path
    assert history_source.local_history(tmp_path, "other") is None
    assert [one["phase"] for one in history_source.read_local(path)] == ["training"]
    with pytest.raises(AgentError, match="cannot be read"):
        list(history_source.read_local(tmp_path))


# --- whole roles -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_two_starts_is_whole_in_its_bucket(tmp_path: Path) -> None:
    """The first trainer is killed, so that nothing of its end is in the bucket; the second is
    started on the same host, and has the rest of the first one copied as well."""
    with fleet.site(tmp_path) as site:
        site.proxy()
        replica = site.replica("r1")
        first = site.trainer(300, "--set=train.fake_rollouts=4")
        first.wait_for(r"adapter.published adapter=\S+\.v000003")
        first.process.kill()
        first.process.wait(10)
        last = site.trainer(12, "--set=train.fake_rollouts=4")
        assert last.process.wait(60) == 0, last.text()
        assert replica.process.wait(20) == 0
    local = tmp_path / "trainer" / "trainer" / "demo" / "history.jsonl"
    wanted = [one for one in history_source.read_local(local) if one["kind"] in KINDS]
    found: list[Any] = []
    trio.run(history_source.fold_bucket, config(tmp_path / "bucket"), "demo", found.append)
    assert found == wanted
    run = Run()
    run.add_all(found)
    assert [attempt.ended for attempt in run.attempts] == ["", "training finished"]
    assert (run.name, run.story.step, run.story.finished) == ("demo", 12, "training finished")
    assert run.abouts[-1]["model"] == "tiny"
    assert run.replicas["r1"].syncs >= 12
