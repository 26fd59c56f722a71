"""The report as one HTML page that asks for nothing else: charts, tables and style are within."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from asyncgrpo_agent.core.verdict import Evidence, Verdict
from asyncgrpo_agent.report import facts
from asyncgrpo_agent.report.charts import draw
from asyncgrpo_agent.report.facts import Table
from asyncgrpo_agent.report.figures import Figure, flat
from asyncgrpo_agent.report.run import Run
from asyncgrpo_agent.report.svg import svg
from asyncgrpo_agent.report.ticks import short

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_TOO_EARLY: Final = "Too few steps with their times were logged to say what held the run up."
_STYLE: Final = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #57606a; --grid: #e4e7eb;
  --axis: #8c959f; --bad: #cf222e; --c0: #0b6bcb; --c1: #d9730d; --c2: #12805c; --c3: #8250df;
  --page: #fff; --soft: #a3c8ec; --card: #fff; --line: #d8dee4; --quiet: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --muted: #9aa4af; --grid: #2a3038;
  --axis: #6e7781; --bad: #ff7b72; --c0: #58a6ff; --c1: #f0883e; --c2: #3fb98a; --c3: #bc8cff;
  --page: #0d1117; --soft: #3d6fa3; --card: #12171e; --line: #30363d; --quiet: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 34px 0 10px; }
.made { color: var(--muted); margin: 0 0 18px; font-size: 13px; }
.verdict { border-left: 4px solid var(--c0); background: var(--quiet); padding: 12px 16px; }
.verdict p { margin: 0; } .verdict .sentence { font-size: 17px; font-weight: 600; }
.verdict ul { margin: 6px 0 0; padding-left: 18px; color: var(--muted); }
dl { margin: 18px 0 0; } dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
dl div { display: grid; gap: 0 16px; padding: 2px 0; break-inside: avoid; }
.title div { grid-template-columns: 110px 1fr; }
.settings { columns: 2 340px; column-gap: 40px; font-size: 13.5px; margin-top: 0; }
.settings div { grid-template-columns: 1fr 1fr; border-bottom: 1px solid var(--line); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 18px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; background: var(--card);
  padding: 10px 12px 12px; }
svg { display: block; width: 100%; height: auto;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; }
figcaption, .note { color: var(--muted); font-size: 13px; margin: 6px 0 0; }
figcaption b { color: var(--text); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--muted); font-weight: 600; border-bottom-width: 2px; white-space: nowrap; }
th.n, td.n { text-align: right; white-space: nowrap; padding-right: 18px; }
@media (max-width: 640px) { .title div { grid-template-columns: 1fr; padding-bottom: 8px; } }
@media print { :root { color-scheme: light; --text: #000; --muted: #444; --grid: #ddd;
  --axis: #888; --bad: #b00020; --c0: #0b57a4; --c1: #b85c00; --c2: #0d6b4c; --c3: #6b3fc0;
  --page: #fff; --soft: #a9c8e6; --card: #fff; --line: #bbb; --quiet: #f4f4f4; }
  body { font-size: 11px; } main { max-width: none; padding: 0; } @page { margin: 13mm; }
  h1 { font-size: 20px; } h2 { font-size: 14px; margin: 18px 0 6px; break-after: avoid; }
  figure, tr, .verdict { break-inside: avoid; } .verdict .sentence { font-size: 13px; }
  .figures { grid-template-columns: 1fr 1fr; gap: 8px; } figcaption, .note { font-size: 10px; }
  table, .settings { font-size: 10px; } th, td { padding: 2px 8px 2px 0; } }
"""
_INKS: Final = ("text", "muted", "grid", "axis", "bad", "soft", "c0", "c1", "c2", "c3")


def page(run: Run, figures: Sequence[Figure], *, made: str) -> str:
    """The whole of it. `made`: by what, and when."""
    name = escape(run.name)
    parts = [
        head(f"Report on run {name}"),
        f"<body><main><h1>Run {name}</h1>",
        f'<p class="made">{escape(made)}</p>',
        _verdict(facts.verdict(run)),
        definitions(facts.title_facts(run), "title"),
        "<h2>Charts</h2>",
        _figures(figures, flat(run)),
        *(shown(table) for table in facts.tables(run)),
    ]
    if settings := facts.settings(run):
        parts.append(f"<h2>Settings</h2>{definitions(settings, 'settings')}")
    return "\n".join([*parts, "</main></body></html>"]) + "\n"


def head(title: str) -> str:
    """Up to the body; `title` is HTML."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}{_ink_rules()}</style></head>",
        ]
    )


def _ink_rules() -> str:
    rules = [
        f".s-{ink} {{ stroke: var(--{ink}); }} .f-{ink} {{ fill: var(--{ink}); }}"
        f" .a-{ink} {{ fill: var(--{ink}); opacity: .18; }}"
        for ink in _INKS
    ]
    return "\n".join([*rules, ".s-guide { stroke: var(--axis); } .a-soft { opacity: .45; }"])


def _verdict(verdict: Verdict) -> str:
    if verdict.kind == "starting":
        return f'<div class="verdict"><p>{_TOO_EARLY}</p></div>'
    evidence = "; ".join(map(_evidence, verdict.evidence))
    advice = " ".join(verdict.advice)
    items = "".join(f"<li>{escape(text)}</li>" for text in (evidence, advice) if text)
    return (
        f'<div class="verdict"><p class="sentence">{escape(verdict.sentence)}</p>'
        f"<ul>{items}</ul></div>"
    )


def _evidence(one: Evidence) -> str:
    if one.unit == "share":
        limit = f" (limit {one.limit:.0%})" if one.limit is not None else ""
        return f"{one.name}: {one.value:.1%} of the time{limit}"
    limit = f" of {one.limit:g}" if one.limit is not None else ""
    return f"{one.name}: {short(one.value)}{limit} {one.unit}".rstrip()


def definitions(rows: Sequence[tuple[str, str]], style: str) -> str:
    """Names and what they stand for; `style` is "title" or "settings"."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows
    )
    return f'<dl class="{style}">{items}</dl>'


def _figures(figures: Sequence[Figure], not_drawn: Sequence[str]) -> str:
    drawn = "\n".join(_figure(number, one) for number, one in enumerate(figures, 1))
    none = "" if figures else '<p class="note">No step was logged.</p>'
    note = f'<p class="note">0 at every step: {escape("; ".join(not_drawn))}.</p>'
    return f'<div class="figures">{drawn}</div>{none}{note if not_drawn else ""}'


def _figure(number: int, figure: Figure) -> str:
    caption = f"<b>Figure {number}.</b> {escape(figure.caption)}"
    picture = svg(draw(figure.chart), figure.caption)
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def shown(table: Table) -> str:
    """With its title as a heading."""
    head = "".join(
        f'<th scope="col"{_class(table, at)}>{escape(name)}</th>'
        for at, name in enumerate(table.columns)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{_class(table, at)}>{escape(cell)}</td>" for at, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>{note}"
    )


def _class(table: Table, at: int) -> str:
    return ' class="n"' if at in table.numbers else ""
