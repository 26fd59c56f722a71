"""Names of adapters and the reconcile plan: what a replica stages, loads, unloads and deletes.

A physical name carries run, attempt, version and digest, so two byte strings never share one.
Keys are paths below the run's folder in the bucket, joined with `/`; a key that was once tried is
never used again, a retry takes the suffix `-rN`.

The plan is level-triggered: it compares what is listed, staged, loaded and wanted, and remembers
nothing. It never loads another run, another attempt or a version below the high-water mark that
the run does not name as live, and never drops what is live, in use, or the best that is loaded. An
attempt older than the mark's leaves everything as it is. The newest is served before anything else
is copied: a plan ends with what has to be staged first. What is here already, and newer than all
that is loaded, is loaded before that, so that a host which copies more slowly than the trainer
publishes serves all the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

COMMITS_PER_FOLDER: Final = 500
MAX_RETRIES: Final = 99  # names of one version beyond the first
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
ADAPTER_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)

_NAME_DIGEST_CHARS: Final = 12
_ATTEMPT: Final = r"a(?P<number>\d{4}|[1-9]\d{4,8})-(?P<nonce>[0-9a-f]{4})"
_VERSION: Final = r"v(?P<version>\d{6}|[1-9]\d{6,8})"
_RETRY: Final = r"(?:-r(?P<retry>[1-9]\d?))?"
_RUN_RE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
_ATTEMPT_RE: Final = re.compile(_ATTEMPT, re.ASCII)
_NAME_RE: Final = re.compile(
    rf"(?P<run>{_RUN_RE.pattern})\.(?P<attempt>{_ATTEMPT})\.{_VERSION}"
    rf"\.(?P<digest>[0-9a-f]{{{_NAME_DIGEST_CHARS}}})",
    re.ASCII,
)
_FOLDER_RE: Final = re.compile(rf"{_VERSION}{_RETRY}", re.ASCII)
_COMMIT_KEY_RE: Final = re.compile(
    rf"commits/(?P<attempt>{_ATTEMPT})/(?P<folder>\d{{6}})/{_VERSION}{_RETRY}\.toml", re.ASCII
)


# --- names -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One start of a run's trainer. Two starts may draw one number: the nonce tells them apart."""

    number: int
    nonce: str

    def __str__(self) -> str:
        return format_attempt(self.number, self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterId:
    """The identity of one adapter; `digest` is the sha256 over its files, see `adapter_digest`."""

    run: str
    attempt: str
    version: int
    digest: str

    @property
    def name(self) -> str:
        short = self.digest[:_NAME_DIGEST_CHARS]
        return f"{self.run}.{self.attempt}.v{self.version:06d}.{short}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameParts:
    """What a physical name says; `digest` holds the first characters only."""

    run: str
    attempt: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitKey:
    """What the key of a commit says; `retry` is 0 for the first try."""

    attempt: str
    version: int
    retry: int


def is_run_name(text: str) -> bool:
    return _RUN_RE.fullmatch(text) is not None


def format_attempt(number: int, nonce: str) -> str:
    """`a0003-7f3c`; raises ValueError for what `parse_attempt` would not read back."""
    text = f"a{number:04d}-{nonce}"
    parse_attempt(text)
    return text


def parse_attempt(text: str) -> Attempt:
    """Raises ValueError for anything but `a0003-7f3c`."""
    match = _ATTEMPT_RE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an attempt such as a0003-7f3c")
    return Attempt(int(match["number"]), match["nonce"])


def is_attempt(text: str) -> bool:
    return _ATTEMPT_RE.fullmatch(text) is not None


def parse_name(name: str) -> NameParts | None:
    """The parts of a physical name, or None for any other text, such as a base model's name."""
    match = _NAME_RE.fullmatch(name)
    if match is None:
        return None
    return NameParts(
        run=match["run"],
        attempt=match["attempt"],
        version=int(match["version"]),
        digest=match["digest"],
    )


def adapter_digest(sha256_by_file: Mapping[str, str]) -> str:
    """sha256, in hex, over the sorted list of file names and their sha256."""
    lines = "".join(f"{name}\0{sha256_by_file[name]}\n" for name in sorted(sha256_by_file))
    return hashlib.sha256(lines.encode()).hexdigest()


# --- keys ------------------------------------------------------------------------------------


def adapter_folder(attempt: str, version: int, retry: int = 0) -> str:
    return f"adapters/{attempt}/v{version:06d}{_suffix(retry)}"


def parse_adapter_folder(name: str) -> int | None:
    """The version that the last part of an adapter's folder says, or None for any other name."""
    match = _FOLDER_RE.fullmatch(name)
    return None if match is None else int(match["version"])


def commit_folder(attempt: str, version: int) -> str:
    return f"commits/{attempt}/{version // COMMITS_PER_FOLDER:06d}"


def commit_key(attempt: str, version: int, retry: int = 0) -> str:
    return f"{commit_folder(attempt, version)}/v{version:06d}{_suffix(retry)}.toml"


def parse_commit_key(key: str) -> CommitKey | None:
    """The parts of a commit's key, or None for a key that no publisher of ours writes."""
    match = _COMMIT_KEY_RE.fullmatch(key)
    if match is None:
        return None
    version = int(match["version"])
    if int(match["folder"]) != version // COMMITS_PER_FOLDER:
        return None
    return CommitKey(attempt=match["attempt"], version=version, retry=int(match["retry"] or 0))


def _suffix(retry: int) -> str:
    return f"-r{retry}" if retry else ""


# --- reconcile -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Copy the adapter that the commit at `key` describes onto local disk, and verify it."""

    adapter: AdapterId
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Hand the staged folder to vLLM."""

    adapter: AdapterId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """Tell vLLM to forget the name. The staged files stay for now."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveStaged:
    """Delete the staged folder named `digest`."""

    digest: str
    reason: str


Decision = Stage | Load | Unload | RemoveStaged
Listed = tuple[AdapterId, str]  # an adapter and the key of its commit


@dataclass(slots=True, kw_only=True)
class _Slots:
    """The names vLLM holds while a plan is made. `spare` may go, dearest last."""

    held: int
    limit: int
    spare: list[Unload] = field(default_factory=list)

    def make_room(self) -> list[Unload] | None:
        """What to unload so that one more name fits, or None if nothing may go."""
        excess = self.held + 1 - self.limit
        if excess > len(self.spare):
            return None
        evicted = [self.spare.pop(0) for _ in range(max(0, excess))]
        self.held += 1 - len(evicted)
        return evicted


def plan_reconcile(
    *,
    run: str,
    attempt: str | None,
    listed: Sequence[Listed],
    staged: Set[str],
    loaded: Collection[str],
    in_use: Collection[str],
    live: Sequence[str],
    high_water: tuple[int, int],
    max_held: int,
    retired_before: Set[str],
    ever_loaded: Set[str] | None = None,
) -> list[Decision]:
    """The next steps, in the order in which to take them; none means that all is as it should be.

    `attempt` is the announced one; without it, or with one too old, nothing is touched. `loaded` is
    vLLM's own list, `in_use` the names in local requests, loaded or not, `live` those that the run
    still wants. `retired_before` holds names unloaded before the last sync and not loaded again
    since, and `ever_loaded`, if known, all digests that this vLLM was ever given: staged files
    outside it need not wait for a sync.
    """
    if attempt is None or parse_attempt(attempt).number < high_water[0]:
        return []
    ours = {name: parts for name in loaded if (parts := parse_name(name)) is not None}
    mine = [(a, key) for a, key in listed if a.run == run and a.attempt == attempt]
    best = _best_loaded(ours, run, attempt)
    newest = _newest(mine, attempt, high_water, best)
    first = newest[0].name if newest is not None else None
    if first in ours:
        best = first
    missing = _missing(mine, newest, loaded, in_use, live)
    if newest is not None and newest[0].digest not in staged:
        missing = _next_best(mine, attempt, high_water, best, staged) + missing

    keep = {*live, *in_use, *(name for name in (first, best) if name is not None)}
    stale = [Unload(name=n, reason="no longer live") for n in _oldest_first(ours.keys() - keep)]
    idle = (ours.keys() & set(live)) - {*in_use, first, best}
    spare = [*stale, *(Unload(name=n, reason="idle, slot needed") for n in _oldest_first(idle))]
    replaced = newest is not None and newest[0].digest in staged and best not in (first, *in_use)
    if replaced and best is not None:
        spare.append(Unload(name=best, reason="replaced by the newest"))

    slots = _Slots(held=len(ours), limit=max_held, spare=spare)
    decisions = _bring(missing, staged, slots)
    decisions += [unload for unload in stale if unload not in decisions]
    kept_names = {*keep, *loaded, *(adapter.name for (adapter, _), _ in missing)}
    return decisions + _removals(staged, kept_names, retired_before, ever_loaded)


def _bring(
    missing: Sequence[tuple[Listed, str]], staged: Set[str], slots: _Slots
) -> list[Decision]:
    """Load what is here, if a slot can be had for it, up to the first that has to be staged."""
    decisions: list[Decision] = []
    for (adapter, key), reason in missing:
        if adapter.digest not in staged:
            return [*decisions, Stage(adapter=adapter, key=key, reason=reason)]
        if (evicted := slots.make_room()) is not None:
            decisions += evicted
            decisions.append(Load(adapter=adapter, reason=reason))
    return decisions


def _missing(
    mine: Sequence[Listed],
    newest: Listed | None,
    loaded: Collection[str],
    in_use: Collection[str],
    live: Sequence[str],
) -> list[tuple[Listed, str]]:
    """What vLLM should hold and does not: the newest, then live names that requests ask for."""
    asked = {a.name: (a, key) for a, key in mine if a.name in in_use and a.name in live}
    rows = [(newest, "newest commit")] if newest is not None else []
    rows += [
        (asked[name], "live, and a request names it")
        for name in reversed(_oldest_first(asked))
        if newest is None or name != newest[0].name
    ]
    return [row for row in rows if row[0][0].name not in loaded]


def _next_best(
    mine: Sequence[Listed],
    attempt: str,
    high_water: tuple[int, int],
    best: str | None,
    staged: Set[str],
) -> list[tuple[Listed, str]]:
    """What can be loaded at once and is newer than all that is loaded."""
    here = [row for row in mine if row[0].digest in staged]
    found = _newest(here, attempt, high_water, best)
    if found is None or found[0].name == best:
        return []
    return [(found, "the newest that is here")]


def _newest(
    mine: Sequence[Listed], attempt: str, high_water: tuple[int, int], best: str | None
) -> Listed | None:
    """The highest version, of a second publication of it the last; None if vLLM has a higher."""
    if not mine:
        return None
    newest = max(mine, key=lambda row: (row[0].version, _retry(row[1])))
    if (parse_attempt(attempt).number, newest[0].version) < high_water:
        return None
    return None if best is not None and _version(best) > newest[0].version else newest


def _best_loaded(ours: Mapping[str, NameParts], run: str, attempt: str) -> str | None:
    names = [n for n, parts in ours.items() if parts.run == run and parts.attempt == attempt]
    return _oldest_first(names)[-1] if names else None


def _removals(
    staged: Set[str],
    kept_names: Collection[str],
    retired_before: Set[str],
    ever_loaded: Set[str] | None,
) -> list[Decision]:
    """vLLM may read a folder again for a while after an unload, so those wait for one more sync."""
    kept = _digests(kept_names)
    retired = _digests(retired_before)
    decisions: list[Decision] = []
    for digest in sorted(staged):
        short = digest[:_NAME_DIGEST_CHARS]
        if short in kept:
            continue
        if short in retired:
            decisions.append(RemoveStaged(digest=digest, reason="unloaded before the last sync"))
        elif ever_loaded is not None and digest not in ever_loaded:
            decisions.append(RemoveStaged(digest=digest, reason="superseded before it was loaded"))
    return decisions


def _digests(names: Collection[str]) -> set[str]:
    return {parts.digest for name in names if (parts := parse_name(name)) is not None}


def _oldest_first(names: Collection[str]) -> list[str]:
    return sorted(names, key=lambda name: (_version(name), name))


def _version(name: str) -> int:
    parts = parse_name(name)
    return -1 if parts is None else parts.version


def _retry(key: str) -> int:
    parts = parse_commit_key(key)
    return 0 if parts is None else parts.retry
