from typing import Any

from asyncgrpo_agent.core.run_events import Event
from asyncgrpo_agent.core.story import StepRow, Story, Told
from asyncgrpo_agent.core.sync_rows import SyncRow

ADAPTER = "demo.a0001-abcd.v000003.0123456789ab"


def told(story: Story, kind: str, t: float = 1.0, **fields: Any) -> list[Told]:
    return story.add({"t": t, "kind": kind, **fields})


def step(story: Story, number: int, **values: float) -> list[Told]:
    return told(story, "metrics", float(number), step=number, max_steps=50, values=values)


def test_steps_become_series_and_the_newest_stay_as_they_were() -> None:
    story = Story()
    for number in range(1, 200):
        (row,) = step(story, number, reward=number / 100)
        assert isinstance(row, StepRow)
    assert (story.step, story.max_steps, len(story.recent)) == (199, 50, 64)
    assert story.value("reward") == 1.99
    assert story.series.read(["reward"], 5).series["reward"]["max"][-1] == 1.99


def test_a_resume_goes_back_to_its_step() -> None:
    story = Story()
    for number in range(1, 20):
        step(story, number, reward=1.0)
    (event,) = told(story, "resumed", step=10, source="bucket")
    assert isinstance(event, Event)
    assert event.name == "run.resumed"
    assert story.step == 10


def test_a_sync_of_the_history_is_a_row_and_an_event() -> None:
    story = Story()
    report = {"timed_out": False, "elapsed_s": 0.7}
    told(
        story, "ack", 9.0, replica="r1", adapter=ADAPTER, ok=True, reason="",
        phases_s={"load": 0.2}, seconds=0.6,
    )  # fmt: skip
    row, event = told(
        story, "sync", 10.0, adapter=ADAPTER, version=3, bytes=5, phases_s={"save": 0.1},
        seconds=1.0, report=report,
    )  # fmt: skip
    assert isinstance(row, SyncRow)
    assert (row.quorum_s, row.elapsed_s, row.started_unix_s) == (0.7, 1.0, 9.0)
    assert row.replicas[0].phases_s == {"load": 0.2}
    assert isinstance(event, Event)
    assert event.text == "Sync of version 3 reached its quorum after 0.70 s"


def test_what_the_proxy_has_seen_itself_is_not_told_twice() -> None:
    story = Story(since_unix_s=100.0)
    assert told(story, "replica", 99.0, name="r1", state="READY", reason="up")
    assert not told(story, "replica", 101.0, name="r1", state="GONE", reason="down")
    sync = {"adapter": ADAPTER, "version": 3, "bytes": 5, "phases_s": {}, "seconds": 1.0}
    assert [type(one) for one in told(story, "sync", 101.0, **sync)] == [SyncRow]


def test_losses_say_for_how_long_a_replica_had_been_there() -> None:
    story = Story()
    story.replica_moved("r1", "READY", "engine is up", 10.0)
    lost = story.replica_moved("r1", "GONE", "link ended", 70.0)
    assert (lost.severity, lost.duration_s, lost.replica) == ("warning", 60.0, "r1")
    story.replica_moved("r2", "DRAINING", "drained", 10.0)
    assert story.replica_moved("r2", "GONE", "link ended", 70.0).severity == "info"


def test_the_course_of_a_run() -> None:
    story = Story()
    told(story, "started", attempt="a0001-abcd", run="demo", max_steps=7)
    told(story, "phase", phase="training")
    told(story, "limits", queue_maxsize=512)
    told(story, "eval", when="before", accuracy=0.5, samples=20, prompts=5)
    told(story, "restarting", reason="TRL crashed", in_s=5.0)
    told(story, "error", what="out of memory", fix="use less")
    told(story, "ended", ok=False, reason="failed")
    assert (story.attempt, story.phase, story.max_steps) == ("a0001-abcd", "training", 7)
    assert story.limits == {"queue_maxsize": 512}
    assert story.failed
    told(story, "started", attempt="a0002-abcd", run="demo")
    told(story, "ended", ok=True, reason="training finished")
    assert (story.finished, story.failed) == ("training finished", False)
    names = [event.name for event in story.events.find()]
    assert names[:2] == ["run.ended", "run.started"]
    assert "trainer.error" in names


def test_records_that_make_no_sense_are_skipped() -> None:
    story = Story()
    for record in ({}, {"t": "x"}, {"t": 1, "kind": "metrics"}, {"t": 1, "kind": "ack", "ok": 1}):
        assert story.add(record) == []
    assert told(story, "something") == []


def test_what_the_trainer_tells_of_the_run_and_of_the_fleet() -> None:
    story = Story()
    assert told(story, "about", model="base", settings={"learning_rate": 1e-5}) == []
    step(story, 3, reward=1.0)
    assert told(story, "traffic", step=3, ready=2, retried=5, held_s=1.5, cost=0.25) == []
    assert (story.about["model"], story.traffic["cost"]) == ("base", 0.25)
    assert story.series.read(["agrpo/ready"], 9).series["agrpo/ready"]["mean"][-1] == 2.0
