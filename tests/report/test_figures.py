from __future__ import annotations

from asyncgrpo_agent.report.charts import Line
from asyncgrpo_agent.report.figures import RATIO_BAND, figures, flat, running_mean
from asyncgrpo_agent.report.run import Run
from fakes.histories import simulated


def folded(steps: int = 300) -> Run:
    run = Run()
    run.add_all(simulated(steps, resume_at=None))
    return run


def test_a_run_has_a_chart_of_all_that_it_logs() -> None:
    found = {figure.name: figure for figure in figures(folded())}
    names = "reward evaluation ratio staleness queue in-flight step-time tokens sync replicas"
    more = "retries loss kl entropy grad-norm learning-rate completion-length"
    assert list(found) == [*names.split(), *more.split()]
    for figure in found.values():
        assert figure.chart.x_label in ("optimizer step", "policy version")
        assert figure.chart.y_label
        assert figure.caption.endswith(".")
    assert found["ratio"].chart.fixed_y == RATIO_BAND
    assert "every value lies within 0.99 and 1.01" in found["ratio"].caption
    assert "305" not in found["sync"].caption
    assert "300 syncs, p50" in found["sync"].caption
    (well, late) = found["sync"].chart.lines
    assert (len(well.points), len(late.points), late.label) == (297, 3, "timed out")
    assert flat(folded()) == ["time held in the proxy"]


def test_a_reward_of_many_steps_stands_behind_its_mean() -> None:
    raw, mean = figures(folded())[0].chart.lines
    assert (raw.ink, mean.label) == ("soft", "mean of 12 steps")
    assert len(mean.points) == len(raw.points) - 11
    few = figures(folded(6))[0].chart.lines
    assert [line.label for line in few] == ["each step"]


def test_a_very_long_run_is_drawn_with_the_least_and_the_greatest() -> None:
    run = Run()
    for step in range(1, 5001):
        values = {"reward": step % 2 / 1.0}
        run.add({"t": float(step), "kind": "metrics", "step": step, "values": values})
    (figure,) = figures(run)
    raw: Line = figure.chart.lines[0]
    assert len(raw.points) <= 400
    assert {low for _, low, _ in raw.band} == {0.0}
    assert raw.label.startswith("mean of ")


def test_names_of_another_version_are_found() -> None:
    run = Run()
    values = {"throughput/step_s": 3.0}
    run.add({"t": 1.0, "kind": "metrics", "step": 1, "values": values})
    assert [figure.name for figure in figures(run)] == ["step-time"]


def test_a_running_mean() -> None:
    points = [(float(x), float(x)) for x in range(5)]
    assert running_mean(points, 2) == [(1.0, 0.5), (2.0, 1.5), (3.0, 2.5), (4.0, 3.5)]


def test_a_run_without_steps_has_none() -> None:
    assert figures(Run()) == []
    assert flat(Run()) == []
