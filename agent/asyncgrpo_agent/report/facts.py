"""The words and figures of a report: what was run, how it went, and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from asyncgrpo_agent.core import trl_metrics as t
from asyncgrpo_agent.core.progress import percentile
from asyncgrpo_agent.core.run_events import MAX_EVENTS, Event
from asyncgrpo_agent.core.sync_rows import MAX_SYNCS, SyncRow
from asyncgrpo_agent.core.verdict import FleetFacts, Verdict, judge
from asyncgrpo_agent.report.run import ReplicaFacts, Run
from asyncgrpo_agent.report.ticks import short

JUDGED: Final = 40  # parts of the run that the verdict is about
MAX_SHOWN_EVENTS: Final = 100
MAX_NAMES: Final = 12
UNKNOWN: Final = "\u2013"
_PACKAGES: Final = ("trl", "transformers", "peft", "torch", "accelerate")
_REPLICA_PHASES: Final = {
    "visible": "until the commit was seen",
    "read": "copy from the bucket",
    "check": "check signature, hashes and LoRA",
    "sync": "flush to disk",
    "loaded": "load into vLLM",
    "acked": "all of it, since it was noticed",
}
_TRAINER_PHASES: Final = {
    "check": "inspect the saved files",
    "copy": "copy to the bucket",
    "commit": "write the signed commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells are texts; those of columns in `numbers` stand to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""


# --- what was run ----------------------------------------------------------------------------


def title_facts(run: Run) -> list[tuple[str, str]]:
    """By name, in the order of a title page."""
    story, about = run.story, _about(run)
    facts = [
        ("Outcome", outcome(run)),
        ("Steps", _steps(run)),
        ("Reward", _reward(run)),
        ("Model", _model(about)),
        ("Trainer host", _names({one.host for one in run.attempts if one.host})),
        ("Replicas", f"{len(run.replicas)}: {_names(run.replicas)}" if run.replicas else UNKNOWN),
        ("Versions", _versions(about, story.versions)),
        ("Dates", _dates(run)),
        ("Rollouts", _rollouts(run)),
        ("Cost", _cost(run)),
    ]
    return [(name, text) for name, text in facts if text and text != UNKNOWN]


def _about(run: Run) -> Mapping[str, Any]:
    return run.abouts[-1] if run.abouts else {}


def outcome(run: Run) -> str:
    """How it ended, as far as anybody has recorded."""
    story = run.story
    if story.failed:
        return f"did not finish: {story.finished}"
    if story.finished:
        return f"finished: {story.finished}"
    return f"no end is recorded; the last record is of {_time(run.last_unix_s)}"


def _steps(run: Run) -> str:
    limit = f" of {run.story.max_steps:,}" if run.story.max_steps else ""
    count = len(run.attempts)
    starts = f", in {count} starts of the trainer" if count > 1 else ""
    return f"{run.story.step:,}{limit}{starts}"


def _reward(run: Run) -> str:
    """Of the first and the last tenth."""
    name = t.name_in(run.story.series.names, t.REWARD)
    if name is None:
        return ""
    means = run.story.series.read([name], 10).series[name]["mean"]
    known = [value for value in means if value is not None]
    if len(known) < 2:
        return ""
    return f"{short(known[0])} in the first tenth of the steps, {short(known[-1])} in the last"


def _model(about: Mapping[str, Any]) -> str:
    name = str(about.get("model") or "")
    if not name:
        return ""
    digest = str(about.get("model_digest") or "")[:12]
    parts = [f"weights {digest}" if digest else "", str(about.get("dtype") or "")]
    parts += [str(about.get("quantization") or ""), _length(about.get("max_model_len"))]
    told = ", ".join(part.removeprefix("torch.") for part in parts if part)
    return f"{name} ({told})" if told else name


def _length(value: object) -> str:
    return f"{value} tokens at most" if isinstance(value, int) else ""


def _versions(about: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    found = [("asyncgrpo-agent", about.get("agent_version")), ("vLLM", about.get("vllm_version"))]
    found += [(name, versions.get(name)) for name in _PACKAGES]
    return ", ".join(f"{name} {version}" for name, version in found if version)


def _dates(run: Run) -> str:
    start, end = run.story.started_unix_s, run.last_unix_s
    if not start:
        return ""
    return f"{_time(start)} to {_time(end)} ({duration(end - start)})"


def _rollouts(run: Run) -> str:
    totals = run.story.totals
    if "rollouts" not in totals:
        return ""
    held_s = float(totals.get("held_s", 0.0))
    parts = [
        f"{totals.get('rollouts_failed', 0):,} failed",
        f"{totals.get('retried', 0):,} were sent to a second replica",
        f"some were held in the proxy for {duration(held_s)}" if held_s else "none was held",
    ]
    which = " in the last start of the trainer" if len(run.attempts) > 1 else ""
    return f"{totals['rollouts']:,}{which}; {', '.join(parts)}"


def _cost(run: Run) -> str:
    counted = run.story.totals if "replica_hours" in run.story.totals else run.story.traffic
    hours = counted.get("replica_hours")
    if not isinstance(hours, (int, float)):
        return ""
    cost, unpriced = float(counted.get("cost", 0.0)), float(counted.get("unpriced_hours", 0.0))
    told = f"{hours:.2f} replica hours"
    if unpriced >= hours:
        return f"{told}, of no known price"
    rest = f", and {unpriced:.2f} hours of no known price" if unpriced else ""
    return f"{cost:.2f} for {told}{rest}"


def verdict(run: Run) -> Verdict:
    """Over all steps, in which losses of replicas show as waiting."""
    store = run.story.series
    series = store.read(store.names, JUDGED)
    steps = [
        {
            name: value
            for name, rows in series.series.items()
            if (value := rows["mean"][at]) is not None
        }
        for at in range(len(series.step))
    ]
    span = f"{run.story.step:,} steps"
    return judge(steps, run.story.limits, FleetFacts(), over=span, most=JUDGED)


def settings(run: Run) -> list[tuple[str, str]]:
    """By name, of the newest attempt."""
    found = _about(run).get("settings")
    if not isinstance(found, dict):
        return []
    return [(str(name), _setting(value)) for name, value in found.items()]


def _setting(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return f"{value:g}"


# --- tables ----------------------------------------------------------------------------------


def tables(run: Run) -> list[Table]:
    """Those that have rows."""
    found = [_syncs(run), _replicas(run), _evaluations(run), _attempts(run), _events(run)]
    return [table for table in found if table is not None]


def _syncs(run: Run) -> Table | None:
    rows = run.story.syncs.find(limit=MAX_SYNCS)
    if not rows:
        return None
    trainer = _by_phase(row.trainer_phases_s for row in rows)
    replica = _by_phase(one.phases_s for row in rows for one in row.replicas if one.ok)
    shown = [
        *(_phase("trainer", text, trainer.get(name)) for name, text in _TRAINER_PHASES.items()),
        *(_phase("replica", text, replica.get(name)) for name, text in _REPLICA_PHASES.items()),
        _phase("all", "from the announcement to the quorum", _seconds(rows, "quorum_s")),
        _phase("all", "TRL's load call", _seconds(rows, "elapsed_s")),
    ]
    late = sum(row.timed_out for row in rows)
    note = f"{len(rows)} syncs; {late} ended by their time limit and not by their quorum."
    return Table(
        title="Weight syncs by phase, in seconds",
        columns=("where", "phase", "count", "p50", "p95", "max"),
        rows=[row for row in shown if row is not None],
        numbers=frozenset((2, 3, 4, 5)),
        note=note,
    )


def _by_phase(phases: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for phases_s in phases:
        for name, seconds in phases_s.items():
            found.setdefault(name, []).append(seconds)
    return found


def _seconds(rows: Sequence[SyncRow], name: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, name)) is not None]


def _phase(where: str, text: str, seconds: list[float] | None) -> tuple[str, ...] | None:
    if not seconds:
        return None
    shares = [percentile(seconds, 0.5), percentile(seconds, 0.95), max(seconds)]
    return (where, text, f"{len(seconds):,}", *(f"{value:.3f}" for value in shares))


def _replicas(run: Run) -> Table | None:
    if not run.replicas:
        return None
    requests = sum(one.requests or 0 for one in run.replicas.values())
    rows = [_replica(one, requests) for _, one in sorted(run.replicas.items())]
    return Table(
        title="Replicas",
        columns=(
            *("replica", "share of rollouts", "requests", "failed", "ready", "joined", "lost"),
            *("syncs", "refused", "sync p50 (s)", "sync p95 (s)", "last loss"),
        ),
        rows=rows,
        numbers=frozenset(range(1, 11)),
        note="Requests are counted by the proxy; a start of the trainer that was killed could not"
        " record them. The sync's time is from the announcement to the replica's answer.",
    )


def _replica(one: ReplicaFacts, requests: int) -> tuple[str, ...]:
    known = one.requests is not None
    share = f"{(one.requests or 0) / requests:.1%}" if known and requests else UNKNOWN
    acks = list(one.acks_s)
    return (
        one.name,
        share,
        f"{one.requests:,}" if one.requests is not None else UNKNOWN,
        f"{one.failures:,}" if one.failures is not None else UNKNOWN,
        duration(one.ready_s),
        str(one.joined),
        str(one.lost),
        str(one.syncs),
        str(one.refused),
        f"{percentile(acks, 0.5):.3f}" if acks else UNKNOWN,
        f"{percentile(acks, 0.95):.3f}" if acks else UNKNOWN,
        one.last_reason or UNKNOWN,
    )


def _evaluations(run: Run) -> Table | None:
    rows = [
        (
            str(row.get("name") or "evaluation"),
            str(row.get("when", "")),
            str(row.get("step", UNKNOWN)),
            f"{float(row['accuracy']):.4f}",
            str(row.get("samples", UNKNOWN)),
            str(row.get("prompts", UNKNOWN)),
        )
        for row in run.story.evaluations
    ]
    if not rows:
        return None
    return Table(
        title="Evaluations",
        columns=("data", "when", "step", "accuracy", "answers", "prompts"),
        rows=rows,
        numbers=frozenset((2, 3, 4, 5)),
    )


def _attempts(run: Run) -> Table | None:
    rows = [
        (
            one.name,
            one.host or UNKNOWN,
            _time(one.started_unix_s),
            duration(one.last_unix_s - one.started_unix_s),
            f"{one.first_step:,}",
            f"{one.last_step:,}",
            f"checkpoint ({one.source})" if one.source else "from the beginning",
            one.ended or "no end is recorded",
        )
        for one in run.attempts
    ]
    if not rows:
        return None
    return Table(
        title="Starts of the trainer",
        columns=("attempt", "host", "start", "lasted", "from step", "to step", "began", "end"),
        rows=rows,
        numbers=frozenset((4, 5)),
    )


def _events(run: Run) -> Table | None:
    found = run.story.events.find(limit=MAX_EVENTS)
    matter = [event for event in reversed(found) if _matters(event)]
    if not matter:
        return None
    shown = matter
    note = ""
    if len(matter) > MAX_SHOWN_EVENTS:
        half = MAX_SHOWN_EVENTS // 2
        shown = [*matter[:half], *matter[-half:]]
        note = f"The first and the last {half} of {len(matter):,}."
    rows = [(_time(one.t_unix_s), one.severity, one.kind, one.text) for one in shown]
    columns = ("time", "severity", "about", "what happened")
    return Table(title="Events that matter", columns=columns, rows=rows, note=note)


def _matters(event: Event) -> bool:
    is_course = event.kind == "run" and event.name != "run.evaluated"
    return event.severity != "info" or is_course


# --- words -----------------------------------------------------------------------------------


def _names(names: Iterable[str]) -> str:
    found = sorted(names)
    if len(found) > MAX_NAMES:
        return ", ".join(found[:MAX_NAMES]) + f" and {len(found) - MAX_NAMES} others"
    return ", ".join(found)


def _time(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # no time at all
        return UNKNOWN


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
