"""Which versions in the bucket may go, so that a run of any length needs bounded space.

A version goes once the run can no longer ask for it: it is outside the live window, and no rollout
has named it for `NAMED_S`. Nobody is asked for leave: a replica that is away, or dead, never keeps
a version alive; it takes the newest when it is back. Versions that are being written, the newest
of the attempt, and all of an attempt that is not older than ours are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncgrpo_agent.core.adapters import Attempt, parse_attempt, parse_name

NAMED_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Remove every commit of this version, then its data."""

    attempt: str
    version: int
    reason: str


def plan_prune(
    *,
    attempt: str,
    versions: Mapping[str, Collection[int]],
    torn: Mapping[str, Collection[int]],
    live: Sequence[str],
    named_at: Mapping[str, float],
    keep_every: int,
    now: float,
    started: float,
) -> list[Prune]:
    """What to remove now, oldest first.

    `versions` maps each attempt in the bucket to the versions that have a commit there, `torn` to
    those that have data alone: below our newest nobody completes them any more. `named_at` holds
    when a rollout last ended, or was seen under way, that named a physical name. `keep_every` keeps
    the versions it divides; 0 keeps none. `started` is when this trainer began: another attempt's
    versions stay for as long as a replica may still be on its way from it to ours.
    """
    ours = parse_attempt(attempt)
    mine = sorted(versions.get(attempt, ()))
    if not mine:  # nothing of ours could replace what would go
        return []
    prunes = []
    if now - started >= NAMED_S:
        prunes = _older_attempts(ours, versions, torn, keep_every)
    needed = _needed(attempt, live, named_at, now)
    cut = {version for version in torn.get(attempt, ()) if version < mine[-1]} - needed
    reason = "its data never got a commit, or lost it"
    prunes += [Prune(attempt=attempt, version=version, reason=reason) for version in sorted(cut)]
    reason = "outside the live window, and no rollout names it"
    prunes += [
        Prune(attempt=attempt, version=version, reason=reason)
        for version in mine[:-1]
        if version not in needed and not _kept(version, keep_every)
    ]
    return prunes


def _older_attempts(
    ours: Attempt,
    versions: Mapping[str, Collection[int]],
    torn: Mapping[str, Collection[int]],
    keep_every: int,
) -> list[Prune]:
    """All but the newest version of the attempts before ours: a run's last state, should ours die
    young."""
    attempts = map(parse_attempt, {*versions, *torn})
    older = sorted(attempt for attempt in attempts if attempt.number < ours.number)
    last = [str(attempt) for attempt in older if versions.get(str(attempt))][-1:]
    prunes = []
    for attempt in map(str, older):
        found = sorted(versions.get(attempt, ()))
        stays = {v for v in found if _kept(v, keep_every) or (attempt in last and v == found[-1])}
        prunes += [
            Prune(attempt=attempt, version=version, reason=f"superseded by attempt {ours}")
            for version in sorted({*found, *torn.get(attempt, ())} - stays)
        ]
    return prunes


def _needed(
    attempt: str, live: Sequence[str], named_at: Mapping[str, float], now: float
) -> set[int]:
    recent = [name for name, at in named_at.items() if now - at < NAMED_S]
    parts = [parse_name(name) for name in (*live, *recent)]
    return {part.version for part in parts if part is not None and part.attempt == attempt}


def _kept(version: int, keep_every: int) -> bool:
    return keep_every > 0 and version % keep_every == 0
