import logging
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from asyncgrpo_agent.core.usage import Usage
from asyncgrpo_agent.roles.proxy_run import ProxyRun, ReplicaLink, Runs
from asyncgrpo_agent.roles.proxy_usage import SAVE_EVERY_S, UsageBook
from asyncgrpo_agent.store import usages
from fakes.links import linked_pair


async def replica(run: ProxyRun, nursery: trio.Nursery, price: float) -> None:
    link, _ = await linked_pair(nursery)
    here = ReplicaLink(
        replica=run.fleet.join("r1", "i1", 4, trio.current_time()),
        link=link,
        control=None,  # type: ignore[arg-type]  # nothing is told here
        price_per_hour=price,
    )
    run.links["r1"] = here


async def test_a_proxy_that_was_killed_counts_on(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    book = UsageBook(tmp_path)
    runs = Runs(book.of)
    await replica(runs.open("demo"), nursery, 2.0)
    nursery.start_soon(book.keep, runs)
    saved: dict[str, Usage] = {}
    while not saved:  # written in a thread, which has no virtual clock
        await trio.sleep(SAVE_EVERY_S)
        saved, fault = usages.read(usages.path_of(tmp_path))
        assert fault == ""
    before_s = saved["demo"].replica_s
    assert before_s >= SAVE_EVERY_S
    assert usages.path_of(tmp_path).stat().st_mode & 0o777 == 0o600
    later = UsageBook(tmp_path)
    run = Runs(later.of).open("demo")
    assert run.usage.replica_s >= before_s
    await replica(run, nursery, 2.0)
    await trio.sleep(SAVE_EVERY_S)
    run.charge(trio.current_time())
    assert run.usage.replica_s >= before_s + SAVE_EVERY_S
    assert run.usage.cost == pytest.approx(run.usage.replica_s * 2.0 / 3600)


async def test_a_run_that_never_comes_back_is_not_forgotten(tmp_path: Path) -> None:
    path = usages.path_of(tmp_path)
    usages.write(path, usages.encode({"old": Usage(replica_s=5.0)}))
    book = UsageBook(tmp_path)
    runs = Runs(book.of)
    runs.open("new").usage.charge(1.0, 0.0)
    await book.save(runs)
    book.of("new").charge(1.0, 0.0)
    nobody = UsageBook(tmp_path)
    assert nobody.of("old").replica_s == 5.0


async def test_a_file_that_does_not_parse_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = usages.path_of(tmp_path)
    usages.write(path, b"{")
    assert UsageBook(tmp_path).of("demo") == Usage()
    assert [one.message for one in caplog.records] == ["usage.lost"]
    assert not path.exists()
    assert path.with_name(path.name + usages.ASIDE).read_bytes() == b"{"


async def test_it_says_each_hour_what_has_changed(
    tmp_path: Path,
    nursery: trio.Nursery,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = UsageBook(tmp_path)
    runs = Runs(book.of)
    await replica(runs.open("demo"), nursery, 0.0)
    nursery.start_soon(book.keep, runs)
    caplog.set_level("INFO")
    said: list[logging.LogRecord] = []
    while not said:  # it writes in a thread, which has no virtual clock
        await trio.sleep(SAVE_EVERY_S)
        said = [one for one in caplog.records if one.message == "run.usage"]
    fields = said[0].__dict__["agent_fields"]
    assert fields["unpriced_hours"] == fields["replica_hours"] > 0
