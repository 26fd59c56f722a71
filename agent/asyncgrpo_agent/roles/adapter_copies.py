"""A copy of one adapter to take home: which, and onto local disk.

It was checked as a replica checks what it loads, is a stock PEFT folder with nothing of ours in it,
and appears whole or not at all. Nothing is ever overwritten.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapter_log import AdapterLog
from asyncgrpo_agent.core.adapters import parse_name
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.lora import VLLM_RANKS
from asyncgrpo_agent.errors import (
    AdapterPrunedError,
    AgentError,
    ConfigError,
    StoreError,
    UsageError,
)
from asyncgrpo_agent.roles.adapter_reader import RunReader
from asyncgrpo_agent.roles.adapter_results import ResultReader
from asyncgrpo_agent.roles.adapter_sources import (
    Source,
    bucket_source,
    public_key,
    read_log,
    run_of_join,
    run_source,
)
from asyncgrpo_agent.roles.trainer_job import history_file

OVERTAKEN: Final = 4  # times that what was the newest may be gone before it is here
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A copy that was taken home; `reason` says why this version, if it was not named."""

    name: str
    size_bytes: int
    verified: bool
    reason: str


async def take_home(
    config: Config,
    run: str,
    folder: Path,
    *,
    version: int | str,
    attempt: str,
    unverified: bool,
    over_link: bool,
) -> Taken:
    """Copy one adapter to `folder`, which must be empty or not there."""
    _check_free(folder)
    if over_link and unverified:
        raise UsageError(
            "--unverified is for buckets",
            fix="Leave it out: a join, which the proxy asks for, has the run's key",
        )
    key = None if unverified else public_key(config, run)
    if key is None and not unverified:
        raise _keyless(config, run)
    take = partial(_take, config, run, folder, version, attempt, key, over_link)
    for _ in range(OVERTAKEN if version == "newest" else 0):
        with suppress(AdapterPrunedError):  # there is a newer one now
            return await take()
    return await take()


async def _take(
    config: Config,
    run: str,
    folder: Path,
    version: int | str,
    attempt: str,
    key: bytes | None,
    over_link: bool,
) -> Taken:
    if version == "final" and not over_link:
        return await _take_result(config, run, folder, attempt, key)
    async with run_source(config, run, over_link=over_link) as source:
        reader = RunReader(source, run, key)
        attempt, versions = await reader.attempt(attempt)
        numbers, reason = _chosen(version, list(versions), attempt, run, config, over_link)
        commit = await reader.first_readable([k for number in numbers for k in versions[number]])
        await _copy(source, commit, folder)
    return Taken(
        name=commit.adapter.name,
        size_bytes=commit.total_bytes,
        verified=key is not None,
        reason=reason,
    )


async def _take_result(
    config: Config, run: str, folder: Path, attempt: str, key: bytes | None
) -> Taken:
    """What the run has ended with, which any host with the bucket sees."""
    async with bucket_source(config, run) as source:
        commit = await ResultReader(source, run, key).needed(attempt)
        await _copy(source, commit, folder)
    return Taken(
        name=commit.adapter.name,
        size_bytes=commit.total_bytes,
        verified=key is not None,
        reason=f"the result, of step {commit.version}",
    )


def _keyless(config: Config, run: str) -> ConfigError:
    other = run_of_join(config)
    but = f"; the join is for run {other!r}" if other else ""
    return ConfigError(
        f"the public key of run {run!r} is not known here, so nothing shows who made its adapters"
        + but,
        where=str(config.state_dir / "runs"),
        fix=f"Give a join file of the run (--join FILE), or make the key known: asyncgrpo-agent run"
        f" add {run} --public-key KEY. --unverified does without: sizes and hashes are checked, the"
        " signature is not",
    )


# --- choosing --------------------------------------------------------------------------------


def _chosen(
    wanted: int | str,
    versions: Sequence[int],
    attempt: str,
    run: str,
    config: Config,
    over_link: bool,
) -> tuple[Sequence[int], str]:
    """The versions to try, and why. `versions` are all that can be had, newest first."""
    if isinstance(wanted, int):
        if wanted not in versions:
            raise _not_there(wanted, versions, attempt, run, over_link)
        return [wanted], ""
    if wanted == "newest":
        return versions, "the newest that the proxy has" if over_link else "the newest"
    log = read_log(config, run)
    if log is None:
        raise AgentError(
            f"--version {wanted} needs the history of the run, which is on the trainer's host; the"
            f" newest version of attempt {attempt} is {versions[0]}",
            where=str(history_file(config.state_dir, run)),
            fix="Run it there with the trainer's --config or --state-dir, or name a version",
        )
    if wanted == "final":  # of the proxy, which has no results
        _check_ended(log, attempt, versions[0], run)
        _check_last(log, attempt, versions[0], run)
        return versions, "the newest of a run that has ended"
    choice = log.best(attempt, versions)
    if choice is None:
        raise AgentError(
            f"no version of attempt {attempt} has a reward or an evaluation yet; the newest is"
            f" {versions[0]}",
            where=f"run {run}",
            fix="Name a version",
        )
    of_proxy = ", of the versions that the proxy has" if over_link else ""
    return [choice.version], choice.reason + of_proxy


def _check_ended(log: AdapterLog, attempt: str, newest: int, run: str) -> None:
    if not log.ended_well(attempt):
        raise AgentError(
            f"attempt {attempt} has not ended well, or not yet; its newest version is {newest}",
            where=f"run {run}",
            fix="Take that one with --version newest, or another attempt with --attempt",
        )


def _check_last(log: AdapterLog, attempt: str, newest: int, run: str) -> None:
    """A proxy that was started since, or has lost its disk, may have an older one as its newest."""
    names = [parse_name(name) for name in log.live(attempt) or ()]
    last = max((parts.version for parts in names if parts is not None), default=newest)
    if last != newest:
        raise AgentError(
            f"the last version of attempt {attempt} is {last}, the newest at the proxy {newest}",
            where=f"run {run}",
            fix="Take it from the trainer's bucket: --bucket DIR",
        )


def _not_there(
    wanted: int, versions: Sequence[int], attempt: str, run: str, over_link: bool
) -> AgentError:
    place = "at the proxy, which keeps those in use: it" if over_link else "in the bucket, which"
    older = "; others are in the trainer's bucket" if over_link else ""
    return AgentError(
        f"version {wanted} of attempt {attempt} is not {place} has {len(versions)} from"
        f" {versions[-1]} to {versions[0]}",
        where=f"run {run}",
        fix=f"`asyncgrpo-agent adapters {run}` lists them{older}",
    )


# --- copying ---------------------------------------------------------------------------------


def _check_free(folder: Path) -> None:
    try:
        if any(folder.iterdir()):
            raise _not_free(folder)
    except FileNotFoundError:
        if not folder.parent.is_dir():
            raise AgentError("is not there", where=str(folder.parent), fix="Make it") from None
    except OSError as error:
        raise AgentError(
            f"cannot be used: {error.strerror}", where=str(folder), fix="Give another folder"
        ) from error


def _not_free(folder: Path) -> AgentError:
    return AgentError(
        "is not empty, and nothing is overwritten", where=str(folder), fix="Give another folder"
    )


async def _copy(source: Source, commit: Commit, folder: Path) -> None:
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise StoreError(
            f"cannot be written: {error.strerror}", where=str(folder.parent)
        ) from error
    try:
        staged = await source.stage(commit, beside, max_rank=max(VLLM_RANKS))
        _open_to_others(staged.path)
        staged.path.rename(folder)  # fails if something has come there meanwhile
    except OSError as error:
        if error.errno in _TAKEN:
            raise _not_free(folder) from error
        raise StoreError(f"cannot be written: {error.strerror}", where=str(folder)) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _open_to_others(folder: Path) -> None:
    """As far as the user's umask says; what agents stage is for themselves alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)
    folder.chmod(0o777 & ~mask)
