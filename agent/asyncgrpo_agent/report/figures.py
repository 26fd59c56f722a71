"""Which charts a run has, each with a caption that says what is seen on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from asyncgrpo_agent.core import trl_metrics as t
from asyncgrpo_agent.core.progress import percentile
from asyncgrpo_agent.core.series import Series
from asyncgrpo_agent.core.sync_rows import MAX_SYNCS, SyncRow
from asyncgrpo_agent.report.charts import Chart, Guide, Ink, Line, Point, Style
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.report.ticks import short

POINTS: Final = 400
RATIO_BAND: Final = (0.99, 1.01)
_WINDOWS: Final = 25  # that a run is cut into for a running mean
_FEWEST: Final = 5
_STEP: Final = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`name` is that of its file."""

    name: str
    caption: str
    chart: Chart


@dataclass(frozen=True, slots=True)
class _Seen:
    """The series of one run, by the names of TRL 1.16."""

    run: Run
    series: Series

    def name(self, wanted: str) -> str | None:
        return t.name_in(self.run.story.series.names, wanted)

    def points(self, wanted: str) -> list[Point]:
        name = self.name(wanted)
        if name is None:
            return []
        means = self.series.series[name]["mean"]
        return [
            (x, value) for x, value in zip(self._middles(), means, strict=True) if value is not None
        ]

    def band(self, wanted: str) -> list[tuple[float, float, float]]:
        name = self.name(wanted)
        if name is None or not self.series.down_sampled:
            return []
        rows = self.series.series[name]
        return [
            (x, low, high)
            for x, low, high in zip(self._middles(), rows["min"], rows["max"], strict=True)
            if low is not None and high is not None
        ]

    def line(self, wanted: str, label: str, ink: Ink = "c0", style: Style = "line") -> Line:
        return Line(label=label, points=self.points(wanted), ink=ink, style=style)

    def lines(self, wanted: str, label: str = "each step") -> list[Line]:
        """As it was logged; of many steps behind their running mean, which shows the course."""
        points, stride = self.points(wanted), self.series.steps_a_point
        if stride > 1 and label == "each step":
            label = f"mean of {stride} steps"
        window = max(_FEWEST, len(points) // _WINDOWS)
        if len(points) < 2 * window:
            return [Line(label=label, points=points, band=self.band(wanted))]
        mean = running_mean(points, window)
        return [
            Line(label=label, points=points, ink="soft", style="thin", band=self.band(wanted)),
            Line(label=f"mean of {window * stride} steps", points=mean),
        ]

    def limit(self, name: str) -> float | None:
        """Of TRL's configuration."""
        settings = self.run.story.about.get("settings")
        found = self.run.story.limits.get(name)
        if found is None and isinstance(settings, dict):
            found = settings.get(name)
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return float(found) if is_number and found and found > 0 else None

    def _middles(self) -> list[float]:
        return [at + (self.series.steps_a_point - 1) / 2 for at in self.series.step]

    @property
    def resumes(self) -> list[float]:
        return [float(step) for step in self.run.resumed_at]


def figures(run: Run) -> list[Figure]:
    """All that have something to show, in the order of a report."""
    store = run.story.series
    seen = _Seen(run, store.read(store.names, POINTS))
    found = [make(seen) for make in _MAKERS]
    return [figure for figure in found if figure is not None]


def flat(run: Run) -> list[str]:
    """What has no chart, because it was 0 at every step."""
    store = run.story.series
    seen = _Seen(run, store.read(store.names, POINTS))
    named = (("agrpo/retried", "rollouts sent again"), ("agrpo/held_s", "time held in the proxy"))
    return [text for name, text in named if _is_flat(seen.points(name))]


def _is_flat(points: Sequence[Point]) -> bool:
    return bool(points) and all(y == 0 for _, y in points)


# --- rewards and what is optimised -----------------------------------------------------------


def _reward(seen: _Seen) -> Figure | None:
    lines = seen.lines(t.REWARD)
    if not lines[0].points:
        return None
    chart = Chart(
        title="Reward", x_label=_STEP, y_label="mean reward", lines=lines, resumes=seen.resumes
    )
    return Figure(
        name="reward", caption=_of_steps("Mean reward of the samples", lines), chart=chart
    )


def _of_steps(what: str, lines: Sequence[Line]) -> str:
    """A caption that says what the lines are."""
    caption = f"{what} ({lines[0].label})"
    if lines[0].band:
        caption += ", the least and the greatest among these"
    if len(lines) > 1:
        caption += f", and the {lines[1].label} up to each"
    return f"{caption}."


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Over each value and those before it; it begins where there are enough."""
    found: list[Point] = []
    total = 0.0
    for number, (x, y) in enumerate(points):
        total += y
        if number >= window:
            total -= points[number - window][1]
        if number >= window - 1:
            found.append((x, total / window))
    return found


def _evaluations(seen: _Seen) -> Figure | None:
    rows: dict[str, list[Point]] = {}
    for row in seen.run.story.evaluations:
        step = row.get("step")
        if isinstance(step, int):
            name = str(row.get("name") or "accuracy")
            rows.setdefault(name, []).append((float(step), float(row["accuracy"])))
    inks: tuple[Ink, ...] = ("c0", "c1", "c2", "c3")
    lines = [
        Line(label=name[:30], points=sorted(points), ink=ink, style="marked")
        for (name, points), ink in zip(rows.items(), inks, strict=False)
        if len(points) > 1
    ]
    if not lines:
        return None
    chart = Chart(
        title="Evaluation", x_label=_STEP, y_label="share of answers that are right", lines=lines
    )
    caption = "Answers to the evaluation's prompts, sampled from the policy of that step."
    return Figure(name="evaluation", caption=caption, chart=chart)


def _ratio(seen: _Seen) -> Figure | None:
    points = seen.points(t.RATIO)
    if not points:
        return None
    low, high = RATIO_BAND
    outside = sum(not low <= y <= high for _, y in points)
    edges = [Guide(y=low, label=f"{low:g}"), Guide(y=high, label=f"{high:g}")]
    chart = Chart(
        title="Importance ratio",
        x_label=_STEP,
        y_label="trainer / generator probability",
        lines=[*seen.lines(t.RATIO), *_ratios_by_class(seen)],
        fixed_y=RATIO_BAND,
        guides=edges if outside else (),
        resumes=seen.resumes,
    )
    told = "every value lies" if not outside else f"all but {outside} of {len(points)} lie"
    caption = (
        "Mean ratio of the probabilities that the trainer and the generating replica give to a"
        f" token; {told} within {low:g} and {high:g}."
    )
    return Figure(name="ratio", caption=caption, chart=chart)


def _ratios_by_class(seen: _Seen) -> list[Line]:
    """A line for each class of replicas, where rollouts came from several."""
    inks: tuple[Ink, ...] = ("c1", "c2", "c3")
    names = [name for name in sorted(seen.run.story.series.names) if name.startswith(t.RATIO_OF)]
    return [
        seen.line(name, f"class {name.removeprefix(t.RATIO_OF)}", ink)
        for name, ink in zip(names, inks, strict=False)
    ]


def _simple(
    name: str,
    metric: str,
    title: str,
    y_label: str,
    caption: str,
    *,
    floor: float | None = None,
    is_even: bool = False,
) -> Callable[[_Seen], Figure | None]:
    """A chart of one metric; one that `is_even` needs no running mean."""

    def make(seen: _Seen) -> Figure | None:
        points = seen.points(metric)
        if not points or (floor == 0 and metric.startswith("agrpo/") and _is_flat(points)):
            return None
        chart = Chart(
            title=title,
            x_label=_STEP,
            y_label=y_label,
            lines=[seen.line(metric, title)] if is_even else seen.lines(metric),
            floor=floor,
            resumes=seen.resumes,
        )
        return Figure(name=name, caption=caption, chart=chart)

    return make


# --- how the halves keep up with each other --------------------------------------------------


def _staleness(seen: _Seen) -> Figure | None:
    lines = seen.lines(t.STALENESS, "mean of each step")
    greatest = dict(seen.points("sample/staleness_max"))
    caption = (
        "How many versions older than the trained policy those were that generated the samples of"
        " a step"
    )
    if greatest and lines[0].points:
        band = [(x, y, greatest[x]) for x, y in lines[0].points if x in greatest]
        lines[0] = replace(lines[0], band=band)
        caption += "; the shade reaches up to the oldest sample"
    limit = seen.limit("max_staleness")
    guides = [] if limit is None else [Guide(y=limit, label="limit")]
    if limit is not None:
        caption += f"; the limit is max_staleness = {limit:g}"
    return _figure(seen, "staleness", "Staleness", "policy versions", lines, guides, f"{caption}.")


def _queue(seen: _Seen) -> Figure | None:
    return _filled(
        seen, "queue", "Rollout queue", "samples", t.QUEUE, "queue_maxsize",
        "Samples that are scored and wait for the trainer",
    )  # fmt: skip


def _in_flight(seen: _Seen) -> Figure | None:
    return _filled(
        seen, "in-flight", "Rollouts in flight", "rollouts", t.IN_FLIGHT, "max_inflight_tasks",
        "Rollouts that are being generated",
    )  # fmt: skip


def _filled(
    seen: _Seen, name: str, title: str, unit: str, metric: str, limit_name: str, caption: str
) -> Figure | None:
    """Something that has room for so many; the room is drawn where that leaves the line legible."""
    limit = seen.limit(limit_name)
    points = seen.points(metric)
    guides = []
    if limit is not None:
        caption += f"; there is room for {limit:g} ({limit_name})"
        if points and max(y for _, y in points) >= limit / 5:
            guides = [Guide(y=limit, label="limit")]
    return _figure(seen, name, title, unit, seen.lines(metric), guides, f"{caption}.")


def _times(seen: _Seen) -> Figure | None:
    lines = [
        seen.line(t.STEP_S, "whole step"),
        seen.line(t.FWD_BWD_S, "forward, backward", "c2"),
        seen.line(t.WAIT_S, "rollout wait", "c1"),
        seen.line(t.SYNC_S, "weight sync", "c3"),
    ]
    return _figure(
        seen, "step-time", "Time of a step", "seconds", [one for one in lines if one.points], [],
        "Where the time of a step goes, in the trainer.",
    )  # fmt: skip


def _replicas(seen: _Seen) -> Figure | None:
    points = seen.points("agrpo/ready")
    if not points:
        return None
    chart = Chart(
        title="Replicas",
        x_label=_STEP,
        y_label="replicas that are ready",
        lines=[Line(label="ready", points=points, style="steps")],
        floor=0.0,
        whole_y=True,
        resumes=seen.resumes,
    )
    caption = "Replicas whose engine was up and held an adapter in use."
    return Figure(name="replicas", caption=caption, chart=chart)


def _syncs(seen: _Seen) -> Figure | None:
    rows = [row for row in seen.run.story.syncs.find(limit=MAX_SYNCS) if _took_s(row) is not None]
    if not rows:
        return None
    well = [_point(row) for row in reversed(rows) if not row.timed_out]
    late = [_point(row) for row in reversed(rows) if row.timed_out]
    took_s = [took for row in rows if (took := _took_s(row)) is not None]
    p50, p95 = percentile(took_s, 0.5), percentile(took_s, 0.95)
    lines = [Line(label="reached its quorum", points=well, style="dots")]
    if late:
        lines.append(Line(label="timed out", points=late, ink="bad", style="dots"))
    chart = Chart(
        title="Weight sync",
        x_label="policy version",
        y_label="seconds until the quorum",
        lines=lines,
        guides=[Guide(y=p50, label="p50"), Guide(y=p95, label="p95")],
        floor=0.0,
    )
    caption = (
        "From the announcement of each adapter until enough replicas served it;"
        f" {len(rows)} syncs, p50 {short(p50)} s, p95 {short(p95)} s, at most"
        f" {short(max(took_s))} s. Replicas generate meanwhile."
    )
    return Figure(name="sync", caption=caption, chart=chart)


def _took_s(row: SyncRow) -> float | None:
    return row.quorum_s if row.quorum_s is not None else row.elapsed_s


def _point(row: SyncRow) -> Point:
    return float(row.version), _took_s(row) or 0.0


def _figure(
    seen: _Seen,
    name: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    guides: Sequence[Guide],
    caption: str,
) -> Figure | None:
    """Of amounts, which begin at 0."""
    if not any(line.points for line in lines):
        return None
    chart = Chart(
        title=title,
        x_label=_STEP,
        y_label=unit,
        lines=lines,
        guides=guides,
        floor=0.0,
        resumes=seen.resumes,
    )
    return Figure(name=name, caption=caption, chart=chart)


_MAKERS: Final[Sequence[Callable[[_Seen], Figure | None]]] = (
    _reward,
    _evaluations,
    _ratio,
    _staleness,
    _queue,
    _in_flight,
    _times,
    _simple(
        "tokens", t.TOKENS_PER_S, "Generation", "tokens / second",
        "Tokens that all replicas together generated in a second.", floor=0.0,
    ),
    _syncs,
    _replicas,
    _simple(
        "retries", "agrpo/retried", "Rollouts sent again", "rollouts, so far",
        "Rollouts that were sent to a second replica because the first was lost or failed.",
        floor=0.0, is_even=True,
    ),
    _simple(
        "held", "agrpo/held_s", "Held in the proxy", "seconds, so far",
        "Time in which at least one rollout waited because no replica could take it.",
        floor=0.0, is_even=True,
    ),
    _simple("loss", "loss", "Loss", "loss", "The loss, as TRL logs it."),
    _simple("kl", t.KL, "KL divergence", "nats", "KL divergence from the reference policy."),
    _simple("entropy", t.ENTROPY, "Entropy", "nats / token", "Mean entropy of the policy."),
    _simple("grad-norm", "grad_norm", "Gradient norm", "norm", "Norm of the gradient."),
    _simple(
        "learning-rate", "learning_rate", "Learning rate", "learning rate",
        "The learning rate as the schedule had it.", floor=0.0, is_even=True,
    ),
    _simple(
        "completion-length", "completions/mean_length", "Length of completions", "tokens",
        "Mean length of the completions of a step.", floor=0.0,
    ),
)  # fmt: skip
