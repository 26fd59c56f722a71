"""A run's snapshot on a terminal: what holds it up, alerts, replicas, syncs, routing, events.

It gets what the proxy's API gives. Text of peers is shown without what a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NEWEST_SYNCS: Final = 5
NEWEST_EVENTS: Final = 8
_SPENT: Final = ("read", "check", "sync", "loaded")  # phases; others count from the notice on
_STATES: Final = {
    "READY": "green", "SUSPECT": "red", "GONE": "red", "running": "green", "failed": "red",
    "finished": "cyan",
}  # fmt: skip
_SEVERITIES: Final = {"info": "dim", "warning": "yellow", "error": "red"}
_VERDICTS: Final = {"degraded": "red", "balanced": "green", "finished": "cyan", "starting": "dim"}

Row = Mapping[str, Any]


def runs(rows: Sequence[Row]) -> RenderableType:
    """A line for each run."""
    if not rows:
        return Text("No run yet: no trainer and no replica has dialled in.")
    table = _table("run", "state", "step", "reward", "ready", "cost", "held up by")
    for row in rows:
        verdict = row["verdict"] or {}
        table.add_row(
            _plain(row["name"]),
            Text(row["state"], _STATES.get(row["state"], "yellow")),
            _step(row),
            _number(row["reward"], "{:.3f}"),
            f"{row['ready']}/{row['registered']}",
            _number(row["cost"] or None, "{:.2f}"),
            verdict.get("kind", "-"),
        )
    return table


def run(snapshot: Row, faults: Sequence[str]) -> RenderableType:
    """All of one run. `faults` are why it is not well."""
    row = snapshot["run"]
    head = Text.assemble(
        ("run ", "bold"), (_plain(row["name"]), "bold"), f" {row['attempt']}  ",
        (row["state"], _STATES.get(row["state"], "yellow")),
        f"  step {_step(row)}  reward {_number(row['reward'], '{:.3f}')}",
        f"  {row['ready']} of {row['registered']} replicas ready",
        f"  cost {_number(row['cost'] or None, '{:.2f}')}",
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    if ratios := row.get("ratio_by_class"):
        each = ", ".join(f"{_plain(name)} {ratio:.4f}" for name, ratio in ratios.items())
        parts.append(Text(f"ratio by class of replica: {each}"))
    if verdict := snapshot["verdict"]:
        style = _VERDICTS.get(verdict["kind"], "yellow")
        parts.append(Text(_plain(verdict["sentence"]), style))
        parts += [Text(f"  {_plain(advice)}", "dim") for advice in verdict["advice"]]
    shown = [one["sentence"] for one in snapshot["alerts"]] + [(verdict or {}).get("sentence")]
    parts += [Text(f"! {_plain(one)}", "red") for one in faults if one not in shown]
    for alert in snapshot["alerts"]:
        text = f"! {_plain(alert['sentence'])} {_plain(alert['fix'])}"
        parts.append(Text(text, _SEVERITIES.get(alert["severity"], "")))
    parts += [Text(), _replicas(snapshot["replicas"])]
    if snapshot["syncs"]:
        parts += [Text(), _syncs(snapshot["syncs"])]
    parts += [Text(), _routing(snapshot["routing"])]
    if snapshot["events"]:
        parts += [Text(), *map(event, snapshot["events"][:NEWEST_EVENTS])]
    return Group(*parts)


def _replicas(rows: Sequence[Row]) -> RenderableType:
    if not rows:
        return Text("No replica is connected.")
    table = _table(
        *(
            "replica",
            "state",
            "since",
            "version",
            "behind",
            "in flight",
            "tokens/s",
            "KV",
            "failed",
        ),
        *("rtt", "why"),
    )
    for row in sorted(rows, key=lambda one: (one["state"] == "READY", one["name"])):
        kinds = [row.get("quantization") or "", "unverified" if row["unverified"] else ""]
        name = _plain(row["name"]) + "".join(f" ({_plain(kind)})" for kind in kinds if kind)
        version = row["newest_version"]
        table.add_row(
            name,
            Text(row["state"], _STATES.get(row["state"], "yellow")),
            _span(row["since_s"]),
            _number(version, "v{}"),
            _number(row["lag_versions"], "{}"),
            f"{row['in_flight']}/{row['capacity']}",
            f"{row['tokens_per_s']:.0f}",
            _number(row["kv_used"], "{:.0%}"),
            f"{row['failures']}/{row['requests']}",
            _number(row["rtt_ms"], "{:.0f} ms"),
            _plain(row["reason"])[:60],
        )
    return table


def _syncs(rows: Sequence[Row]) -> RenderableType:
    table = _table("sync", "quorum", "bytes", "last replica", "longest phase")
    for row in rows[:NEWEST_SYNCS]:
        took_s = row["quorum_s"] if row["quorum_s"] is not None else row["elapsed_s"]
        told = [one for one in row["replicas"] if one["ok"] and one["since_announced_s"]]
        last = max(told, key=lambda one: one["since_announced_s"], default=None)
        said = {} if last is None else last["phases_s"]
        phases = {name: seconds for name, seconds in said.items() if name in _SPENT}
        longest = max(phases, key=lambda name: phases[name], default=None)
        table.add_row(
            f"v{row['version']}" + (" timed out" if row["timed_out"] else ""),
            _number(took_s, "{:.2f} s"),
            f"{row['bytes']:,}",
            "-" if last is None else f"{_plain(last['name'])} {last['since_announced_s']:.2f} s",
            "-" if longest is None else f"{_plain(longest)} {phases[longest]:.2f} s",
        )
    return table


def _routing(row: Row) -> Text:
    total = sum(row["shares"].values())
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in row["shares"].items())
    tries = _number(row["retries_per_success"], "{:.3f}")
    text = (
        f"routing: {shares or 'nothing yet'}; waiting {row['waiting']}"
        f" (oldest {row['oldest_wait_s']:.1f} s), retried {row['retried']}"
        f" ({tries} a success), refused {row['refused']}"
    )
    return Text(text)


def event(row: Row) -> Text:
    """One line of the log of a run."""
    style = _SEVERITIES.get(row["severity"], "")
    spent = f" ({_span(row['duration_s'])})" if (row.get("duration_s") or 0) >= 1 else ""
    return Text.assemble(
        (_time(row["t_unix_s"]), "dim"), " ", (f"{row['severity']:<7}", style), " ",
        (f"{row['name']:<18}", "bold"), " ", _plain(row["text"]), spent,
    )  # fmt: skip


def rollout(row: Row) -> Group:
    """One rollout to read."""
    rewards = ", ".join(
        f"{_plain(name)} {_number(value, '{:.3f}')}"
        for name, value in (row["rewards"] or {}).items()
    )
    version = f"v{row['version']}" if row["version"] >= 0 else "version unknown"
    head = (
        f"{_time(row['t_unix_s'])}  {version}  {_plain(row['replica']) or 'replica unknown'}"
        f"  {row['tokens']} tokens  {row['seconds']:.1f} s  {rewards}"
    )
    return Group(
        Text(head, "bold"), Text(_lines(row["prompt"]), "dim"), Text(_lines(row["completion"])), ""
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in ("replica", "state", "since"))
    return table


def _step(row: Row) -> str:
    return f"{row['step']}/{row['max_steps']}" if row["max_steps"] else str(row["step"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d}" if hours else f"{minutes} min {rest:02d}"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(text: object) -> str:
    return "".join(c if c.isprintable() else "�" for c in str(text))


def _lines(text: str) -> str:
    return "\n".join(_plain(line) for line in text.split("\n"))
