"""What the API shows of one run, beside its snapshot: series, syncs, events and rollouts to read.

Everything is read from memory in one go; queries are bounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncgrpo_agent.core.story import Story
from asyncgrpo_agent.roles.proxy_run import ProxyRun

MAX_POINTS: Final = 2000
MAX_ROWS: Final = 1000

Query = Mapping[str, list[str]]


class NotFoundError(Exception):
    """There is no such run, or this viewer may not know of it."""


class ForbiddenError(Exception):
    """Prompts and answers are for tokens that were made for them."""


class BadRequestError(Exception):
    """The query makes no sense."""


def _series(story: Story, query: Query) -> object:
    points = min(MAX_POINTS, max(1, number(query, "points", 600)))
    names = [name for text in query.get("names", []) for name in text.split(",") if name]
    series = story.series.read(names, points)
    return {
        "step": series.step,
        "series": series.series,
        "unix_s": series.unix_s,
        "down_sampled": series.down_sampled,
    }


def _syncs(story: Story, query: Query) -> object:
    before = number(query, "before_version", -1)
    limit = min(MAX_ROWS, max(1, number(query, "limit", 100)))
    rows = story.syncs.find(before_version=before if before >= 0 else None, limit=limit)
    return {"syncs": rows}


def _events(story: Story, query: Query) -> object:
    before = number(query, "before_seq", -1)
    events = story.events.find(
        before_seq=before if before >= 0 else None,
        limit=min(MAX_ROWS, max(1, number(query, "limit", 200))),
        kind=query.get("kind", [""])[0],
        text=query.get("text", [""])[0][:100],
    )
    return {"events": events}


def rollouts(run: ProxyRun, query: Query) -> object:
    limit = min(MAX_ROWS, max(1, number(query, "limit", 50)))
    return {"rollouts": list(reversed(run.story.samples))[:limit]}


PARTS: Final[Mapping[str, Callable[[Story, Query], object]]] = {
    "series": _series,
    "syncs": _syncs,
    "events": _events,
}


def number(query: Query, name: str, default: int) -> int:
    text = query.get(name, [""])[0]
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequestError(f"{name} is no number")
    return int(text)
