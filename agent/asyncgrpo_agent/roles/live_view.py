"""The live view of a run in a terminal: progress, reward, syncs, replicas.

It follows the history file that the trainer's agent appends to, so it shows what is recorded and
nothing else. On a terminal the view is redrawn in place; elsewhere a line is printed now and then.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final, TextIO

import trio
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncgrpo_agent.core import progress as p
from asyncgrpo_agent.core.progress import Progress

REDRAW_S: Final = 0.5
LINE_EVERY_S: Final = 10.0
SPARK_WIDTH: Final = 60


async def follow(path: Path, console: Console) -> None:
    """Show the run until cancelled, the last state once more at the end."""
    run = Progress()
    tail = _Tail(path)
    if not console.is_terminal:
        await _print_lines(run, tail, console)
        return
    with Live(console=console, auto_refresh=False, redirect_stderr=False) as live:
        try:
            while True:
                tail.read_into(run)
                live.update(_draw(run), refresh=True)
                await trio.sleep(REDRAW_S)
        finally:
            tail.read_into(run)
            live.update(_draw(run), refresh=True)


async def _print_lines(run: Progress, tail: _Tail, console: Console) -> None:
    """A line when the phase or a replica's state changes, else every few seconds."""
    shown: object = None
    due = 0.0
    while True:
        tail.read_into(run)
        states = (run.phase, tuple((n, r.state) for n, r in run.replicas.items()), run.ended)
        if states != shown or trio.current_time() >= due:
            console.print(_line(run), highlight=False, soft_wrap=True)
            shown, due = states, trio.current_time() + LINE_EVERY_S
        await trio.sleep(REDRAW_S)


class _Tail:
    """Reads what was appended since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._rest = ""

    def read_into(self, run: Progress) -> None:
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open(encoding="utf-8")
        lines = (self._rest + self._file.read()).split("\n")
        self._rest = lines.pop()
        for line in lines:
            run.add(json.loads(line))


def _line(run: Progress) -> str:
    parts = [f"{run.phase:<10}", f"step {_step(run)}/{run.max_steps or '?'}"]
    rewards = run.series(p.REWARD)
    if rewards:
        parts.append(f"reward {_mean(rewards[-10:]):.3f}")
    if run.syncs:
        parts.append(f"syncs {len(run.syncs)} (last {run.syncs[-1].seconds:.2f} s)")
    parts += [f"{name}: {r.state}" for name, r in sorted(run.replicas.items())]
    return "  ".join(parts)


def _draw(run: Progress) -> Group:
    rewards = run.series(p.REWARD)
    ratios = run.series(p.RATIO)
    head = Text.assemble(("asyncgrpo  ", "bold"), (run.phase, "cyan"), _elapsed(run))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        "steps",
        ProgressBar(total=max(1, run.max_steps), completed=_step(run), width=SPARK_WIDTH),
        f"{_step(run)}/{run.max_steps or '?'}",
    )
    bar.add_row(
        "reward",
        Text(p.sparkline(rewards, SPARK_WIDTH), "green"),
        f"{_mean(rewards[-10:]):.3f} (mean of 10)" if rewards else "none yet",
    )
    bar.add_row("ratio", f"{_mean(ratios[-10:]):.4f}" if ratios else "none yet", "")
    for when in ("before", "after"):
        if when in run.evaluations:
            found = run.evaluations[when]
            bar.add_row(f"held-out {when}", f"{found.accuracy:.3f} of {found.samples} answers", "")
    if run.syncs:
        seconds = [sync.seconds for sync in run.syncs]
        bar.add_row(
            "syncs",
            f"{len(seconds)}, p50 {p.percentile(seconds, 0.5):.2f} s, "
            f"p95 {p.percentile(seconds, 0.95):.2f} s",
            "",
        )
    return Group(head, bar, _replica_table(run))


def _replica_table(run: Progress) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("replica", "state", "adapters loaded", "load p50", "why"):
        table.add_column(column)
    for name, replica in sorted(run.replicas.items()):
        style = {"READY": "green", "SUSPECT": "red", "GONE": "red"}.get(replica.state, "yellow")
        table.add_row(
            f"{name} (unverified)" if replica.unverified else name,
            Text(replica.state, style),
            str(len(replica.acks_s)),
            f"{p.percentile(replica.acks_s, 0.5):.2f} s",
            replica.reason[:70],
        )
    return table


def _step(run: Progress) -> int:
    return run.steps[-1].step if run.steps else 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _elapsed(run: Progress) -> str:
    if not run.started_unix_s:
        return "  waiting for the trainer's agent"
    seconds = int(time.time() - run.started_unix_s)  # noqa: TID251 - shown to a person
    return f"  {seconds // 60}:{seconds % 60:02d}"
