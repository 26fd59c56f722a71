"""A run that waits for others is no run that hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from asyncgrpo_agent.errors import ChildNotReadyError
from asyncgrpo_agent.roles import trainer_stall
from asyncgrpo_agent.roles.trainer_stall import StallWatch
from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.fleet import Site


async def test_trl_has_the_whole_limit_from_when_it_can_go_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = StallWatch(10.0, "run", lambda: trio.current_time() < free_at)
    for held_up_s in (0.0, 3.0, 8.9, 9.9, 99.0):
        free_at = trio.current_time() + held_up_s
        watch.heard()
        with pytest.raises(ChildNotReadyError, match="no training step for"):
            await watch.watch()
        assert 10.0 <= trio.current_time() - free_at <= 10.0 + 2 * trainer_stall.LOOK_S


# --- whole agents ----------------------------------------------------------------------------

STALL_S = 2.0
LIMITS = 3  # of a stall, while nobody can answer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        made.proxy()
        yield made


@pytest.mark.slow
def test_time_without_replicas_does_not_count(site: Site) -> None:
    first = site.replica("r0")
    trainer = site.trainer(20, f"--set=trainer.stall_s={STALL_S}", "--set=train.fake_step_s=0.1")
    trainer.wait_for(r"adapter.published adapter=\S+\.v000003")
    first.end(signal.SIGKILL)
    time.sleep(LIMITS * STALL_S)  # noqa: TID251 - the time that must not count
    assert trainer.process.poll() is None, trainer.text()
    again = site.replica("r0")
    assert trainer.process.wait(60) == 0, trainer.text()
    assert again.process.wait(20) == 0
    history = site.folder / "trainer" / "trainer" / "demo" / "history.jsonl"
    assert [one for one in read(history) if one["kind"] == "restarting"] == []
    counts = site.counts()
    assert (counts["failed"], counts["wrong_bytes"], counts["steps"]) == (0, 0, 20)


@pytest.mark.slow
def test_a_fleet_that_could_answer_and_hears_nothing_is_a_stall(site: Site) -> None:
    site.replica("r0")
    hangs = ("--set=train.fake_step_s=1000", "--set=trainer.restarts=0")
    trainer = site.trainer(20, f"--set=trainer.stall_s={STALL_S}", *hangs)
    assert trainer.process.wait(60) == 1
    assert "no training step for" in trainer.text()
    assert "at step 0" in trainer.text()
    assert "trainer.stall_s sets the limit" in trainer.text()
