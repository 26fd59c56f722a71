from __future__ import annotations

import pytest

from asyncgrpo_agent.report.facts import Table, duration, settings, tables, title_facts, verdict
from asyncgrpo_agent.report.run import Run
from fakes.histories import simulated


def folded(*, resume_at: int | None = 180) -> Run:
    run = Run()
    run.add_all(simulated(300, resume_at=resume_at))
    return run


def by_title(run: Run) -> dict[str, Table]:
    return {table.title: table for table in tables(run)}


def test_a_title_page() -> None:
    facts = dict(title_facts(folded()))
    assert facts["Outcome"] == "finished: training finished"
    assert facts["Steps"] == "300 of 300, in 2 starts of the trainer"
    assert facts["Model"].startswith("Qwen2.5-1.5B-Instruct (weights 5e5e5e5e5e5e, bfloat16, 4096")
    assert facts["Trainer host"] == "trainer-1, trainer-2"
    assert facts["Replicas"] == "3: r1, r2, r3"
    assert "vLLM 0.11.0, trl 1.16.0" in facts["Versions"]
    assert facts["Cost"] == "2.89 for 1.52 replica hours"
    assert "UTC to 2025-10-09" in facts["Dates"]
    assert "in the last start of the trainer; 0 failed, 17 were sent" in facts["Rollouts"]


def test_what_is_not_known_is_left_out() -> None:
    run = Run()
    run.add({"t": 1.0, "kind": "metrics", "step": 1, "values": {"reward": 0.5}})
    facts = dict(title_facts(run))
    assert list(facts) == ["Outcome", "Steps", "Dates"]
    assert facts["Outcome"].startswith("no end is recorded; the last record is of 1970-01-01")
    assert (tables(run), settings(run)) == ([], [])


def test_a_run_that_failed_says_why() -> None:
    run = Run()
    run.add({"t": 1.0, "kind": "ended", "ok": False, "reason": "out of memory"})
    assert dict(title_facts(run))["Outcome"] == "did not finish: out of memory"


def test_the_cost_of_a_run_that_was_killed_is_that_of_its_last_step() -> None:
    run = Run()
    run.add_all(one for one in simulated(30, resume_at=None) if one["kind"] != "totals")
    assert dict(title_facts(run))["Cost"] == "0.29 for 0.15 replica hours"
    run.story.traffic = {"replica_hours": 2.0, "unpriced_hours": 2.0, "cost": 0.0}
    assert dict(title_facts(run))["Cost"] == "2.00 replica hours, of no known price"


def test_the_verdict_is_about_all_steps() -> None:
    found = verdict(folded())
    assert found.kind == "balanced"
    assert "over 300 steps" in found.sentence
    assert {one.name for one in found.evidence} >= {"waiting for rollouts", "syncs", "step"}


def test_syncs_are_told_by_phase() -> None:
    table = by_title(folded())["Weight syncs by phase, in seconds"]
    rows = {(where, phase): cells for where, phase, *cells in table.rows}
    assert rows["trainer", "copy to the bucket"] == ["305", "0.300", "0.300", "0.300"]
    assert rows["replica", "load into vLLM"][0] == "915"
    p50, p95, most = map(float, rows["all", "from the announcement to the quorum"][1:])
    assert 0.5 < p50 < p95 < most
    assert "3 ended by their time limit" in table.note


def test_replicas_evaluations_and_starts() -> None:
    found = by_title(folded())
    r3 = next(row for row in found["Replicas"].rows if row[0] == "r3")
    assert r3[1:4] == ("27.5%", "6,120", "17")
    assert r3[6] == "1"
    assert len(found["Evaluations"].rows) == 6
    first, second = found["Starts of the trainer"].rows
    assert first[-1] == "no end is recorded"
    assert second[-2:] == ("checkpoint (bucket)", "training finished")
    texts = [row[-1] for row in found["Events that matter"].rows]
    assert "r3 is GONE: its link ended" in texts
    assert not any("Evaluation" in text for text in texts)


def test_of_many_events_the_first_and_the_last_are_shown() -> None:
    run = Run()
    for at in range(300):
        run.add({"t": at + 1.0, "kind": "error", "what": f"error {at}", "fix": ""})
    table = by_title(run)["Events that matter"]
    assert (len(table.rows), table.note) == (100, "The first and the last 50 of 300.")
    assert (table.rows[0][-1], table.rows[-1][-1]) == ("error 0", "error 299")


def test_settings_are_those_of_the_newest_start() -> None:
    assert ("learning_rate", "1e-05") in settings(folded())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (float("nan"), "\u2013"),
        (4.25, "4.2 s"),
        (61.0, "1 min 1 s"),
        (7260.0, "2 h 1 min"),
        (200_000.0, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
