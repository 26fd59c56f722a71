"""One self-contained HTML page about a run: the reward over the steps as SVG, and a table."""

from __future__ import annotations

import html

from asyncgrpo_agent.core import progress as p
from asyncgrpo_agent.core.progress import Progress

WIDTH, HEIGHT, MARGIN = 860, 320, 48
WINDOW = 10  # steps of the running mean


def reward_chart(run: Progress, figures: dict[str, object]) -> str:
    rewards = run.series(p.REWARD)
    means = [_mean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in figures.items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>asyncgrpo demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }}
th {{ text-align: left; font-weight: normal; padding-right: 2em; color: #555 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #16181c }}
  th {{ color: #999 }}
  .axis {{ stroke: #555 }} text {{ fill: #bbb }} }}
.axis {{ stroke: #bbb }} .sample {{ fill: none; stroke: #9ecae1 }}
.mean {{ fill: none; stroke: #2171b5; stroke-width: 2.5 }} text {{ font-size: 12px; fill: #555 }}
</style>
<h1>Reward by optimizer step</h1>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="reward by step">
{_grid(len(rewards))}
<polyline class="sample" points="{_points(rewards)}"/>
<polyline class="mean" points="{_points(means)}"/>
</svg>
<p>Thin: each step. Thick: mean of {WINDOW} steps.</p>
<table>{rows}</table></html>
"""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _xy(index: int, value: float, count: int) -> tuple[float, float]:
    x = MARGIN + (WIDTH - 2 * MARGIN) * index / max(1, count - 1)
    return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value


def _points(values: list[float]) -> str:
    places = (_xy(index, value, len(values)) for index, value in enumerate(values))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _grid(count: int) -> str:
    lines = []
    for tenth in range(0, 11, 2):
        x, y = _xy(0, tenth / 10, count)
        lines.append(
            f'<line class="axis" x1="{x}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}"/>'
            f'<text x="{MARGIN - 30}" y="{y + 4:.1f}">{tenth / 10}</text>'
        )
    lines.append(f'<text x="{WIDTH - MARGIN - 60}" y="{HEIGHT - 14}">step {count}</text>')
    return "\n".join(lines)
