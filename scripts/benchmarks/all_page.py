"""One page of all benchmarks: figures with their reference, charts, the machine. It asks for
nothing else, and is drawn and styled as a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from all_bars import Bars, drawn

from asyncgrpo_agent.report.charts import Chart, Drawing, Ink, Line, draw
from asyncgrpo_agent.report.facts import Table
from asyncgrpo_agent.report.page import definitions, head, shown
from asyncgrpo_agent.report.svg import svg

Numbers = Mapping[str, Any]
TITLES = {
    "link": "The link, beside aiohttp's HTTP/1.1",
    "sync": "A sync, on a mount with Mountpoint's rules",
    "sync_late": "A sync, on a mount that shows files after 2.5 s",
    "proxy": "Rollouts through gateway, proxy, links and replicas, beside aiohttp's proxy",
    "run": "A run of real TRL, beside one that pauses to sync",
    "view": "The dashboard of a long run",
}
BUSY = 0.3  # cores that others used when a phase began
STOLEN = 0.05  # of all cores' time in a phase, by other guests of the host
WIDTH_PX = 590  # of a chart that stands alone
WAYS: tuple[tuple[str, Ink], ...] = (("ours", "c0"), ("reference", "c1"))
DRAWN = 20.0  # ratios beyond say that the reference stood still


def page(found: Numbers) -> str:
    times = [row["began"] for row in found["phases"].values()]
    made = f"scripts/bench all, {min(times)} to {max(times)}" if times else "scripts/bench all"
    quick = " With --quick: shortened phases, whose figures say little." if found["quick"] else ""
    parts = [
        head("Benchmarks of asyncgrpo-agent"),
        "<body><main><h1>Benchmarks of asyncgrpo-agent</h1>",
        f'<p class="made">{escape(made + "." + quick)}</p>',
        _verdict(found),
        definitions(_machine(found), "title"),
        *(_phase(name, found) for name in TITLES if name in found["phases"]),
        shown(_conditions(found["phases"])),
    ]
    return "\n".join([*parts, "</main></body></html>"]) + "\n"


def _verdict(found: Numbers) -> str:
    """What the figures may be taken for."""
    troubled = [
        f"{name}: {why}" for name, row in found["phases"].items() if (why := disturbance(row))
    ]
    told = (
        f"Disturbed by other load: {'; '.join(troubled)}. Run it again on a quiet machine."
        if troubled
        else "Nothing else of note ran on the machine."
    )
    advice = "Compare ratios, which hold elsewhere, before rates, which are this machine's."
    return (
        f'<div class="verdict"><p class="sentence">{escape(told)}</p>'
        f"<ul><li>{escape(advice)}</li></ul></div>"
    )


def disturbance(row: Numbers) -> str:
    """What else had the machine, in words; empty if nothing of note."""
    said = []
    if row["busy_before"] > BUSY:
        said.append(f"others used {row['busy_before']:.1f} cores when it began")
    if row.get("stolen", 0.0) > STOLEN:
        said.append(f"the host gave {row['stolen']:.0%} of the cores' time to other guests")
    return " and ".join(said)


def _machine(found: Numbers) -> list[tuple[str, str]]:
    here = found["machine"]

    def versions(names: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {version}" for name, version in names.items()) or "none"

    return [
        ("CPU", f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB"),
        ("System", f"{here['system']}, kernel {here['kernel']}, Python {here['python']}"),
        ("Agent", f"{here['agent']}; {versions(here['libraries'])}"),
        ("Engine", versions(here["engine"])),
    ]


# --- phases ----------------------------------------------------------------------------------


def _phase(name: str, found: Numbers) -> str:
    phase, rows = found["phases"][name], [r for r in found["figures"] if r["phase"] == name]
    if "numbers" not in phase:
        why = phase.get("failed") or phase.get("left_out")
        return f'<h2>{escape(TITLES[name])}</h2><p class="note">Not measured: {escape(why)}.</p>'
    pictures = "".join(_picture(*one) for one in _drawings(name, phase["numbers"], rows))
    style = f"margin-top: 14px; max-width: {WIDTH_PX if pictures.count('<figure>') < 2 else 1180}px"
    table = shown(_table(TITLES[name], rows))
    return f'{table}<div class="figures" style="{style}">{pictures}</div>'


def _table(title: str, rows: Sequence[Numbers]) -> Table:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:,.4g}"

    return Table(
        title=title,
        columns=("figure", "ours", "reference", "ratio", "unit", "better"),
        rows=[
            (
                row["name"],
                *(cell(row[key]) for key in ("ours", "reference", "ratio")),
                *(row["unit"], row["better"]),
            )
            for row in rows
        ],
        numbers=frozenset({1, 2, 3}),
    )


def _drawings(name: str, numbers: Numbers, rows: Sequence[Numbers]) -> list[tuple[Drawing, str]]:
    pictures = []
    if pairs := [row for row in rows if 0 < (row["ratio"] or 0) <= DRAWN]:
        caption = (
            "Ours over the reference in the same run; the mark at 1 is the reference. Green is"
            " better than it, orange is not."
        )
        marked = [(f"{r['name']} ({r['better']} is better)", r["ratio"], _ink(r)) for r in pairs]
        pictures.append((drawn(Bars("Ratio to the reference", marked, mark=1.0)), caption))
    if name.startswith("sync"):
        pictures.append((draw(_phases(numbers["ours"]["phases"])), "When each phase had ended."))
    if name == "run":
        pictures.append((drawn(_step(numbers)), "Where the time of a step goes, medians."))
    return pictures


def _ink(row: Numbers) -> Ink:
    return "c2" if (row["ratio"] >= 1) == (row["better"] == "more") else "c1"


def _phases(phases: Numbers) -> Chart:
    """Of the last replica, as time over the number of the phase."""
    lines = [
        Line(
            label=label,
            points=[(float(at), row[key]) for at, row in enumerate(phases.values(), 1)],
            ink=ink,
            style="marked",
        )
        for label, key, ink in (("p50", "p50_s", "c0"), ("p95", "p95_s", "c1"))
    ]
    named = ", ".join(f"{at} {name}" for at, name in enumerate(phases, 1))
    return Chart(
        title="A sync, phase by phase", x_label=named, y_label="seconds", lines=lines, floor=0.0
    )


def _step(numbers: Numbers) -> Bars:
    rows = [
        (f"{way}: {what}", numbers[way][key], ink)
        for way, ink in WAYS
        for what, key in (
            ("whole step", "step_p50_s"),
            ("sync", "sync_p50_s"),
            ("training", "train_p50_s"),
            ("wait for rollouts", "waited_p50_s"),
        )
    ]
    return Bars("Seconds of a step", rows)


def _picture(drawing: Drawing, caption: str) -> str:
    return f"<figure>{svg(drawing, caption)}<figcaption>{escape(caption)}</figcaption></figure>"


# --- conditions ------------------------------------------------------------------------------


def _conditions(phases: Mapping[str, Numbers]) -> Table:
    return Table(
        title="When each phase ran, and beside what",
        columns=("phase", "began", "seconds", "load before", "in use before", "stolen"),
        rows=[
            (
                name,
                row["began"],
                f"{row.get('seconds', 0):,.0f}",
                f"{row['load_before']:.2f}",
                f"{row['busy_before']:.2f}",
                f"{row['stolen']:.1%}" if "stolen" in row else "",
            )
            for name, row in phases.items()
        ],
        numbers=frozenset({2, 3, 4, 5}),
        note="The load is the kernel's of the last minute, which the phase before made too; in use"
        " are cores, in the two seconds before it began; stolen is the share of all cores' time"
        " that the host gave to other guests meanwhile.",
    )
