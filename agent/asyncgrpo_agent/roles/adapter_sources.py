"""Where a run's adapters are read from outside of it, and what this host knows of the run.

Nothing here writes to the bucket, and nothing in this process touches it: what is asked of a
`Source` ends in time, whatever the mount does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final, Protocol, TextIO

import trio
from msgspec import structs

from asyncgrpo_agent.config.host import join_line
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapter_log import AdapterLog
from asyncgrpo_agent.core.adapters import Attempt
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.join import decode
from asyncgrpo_agent.errors import AgentError, BucketUnavailableError, ConfigError
from asyncgrpo_agent.procs.look import mode_of
from asyncgrpo_agent.roles.adapter_link import link_source
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.bucket_mount import bucket_mounted
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store import history, identity
from asyncgrpo_agent.store.bucket import ListedCommit
from asyncgrpo_agent.store.staging import StagedAdapter

MOUNT_S: Final = 60.0
LOOK_S: Final = 3.0  # after that the bucket's own calls tell what is wrong
NO_BUCKET: Final = (
    "Give --bucket DIR, --bucket-url URL or the --config FILE of an agent of the run, or --join"
    " FILE to ask the proxy"
)


class Source(Protocol):
    """Where commits are listed and read, and adapters copied from. Its calls raise StoreError."""

    async def list_runs(self) -> list[str]: ...

    async def list_attempts(self) -> list[Attempt]: ...

    async def list_commits(
        self, attempt: str, after_version: int, *, whole: bool = False
    ) -> list[str]: ...

    async def read_commit(
        self, key: str, *, run: str, public_key: bytes | None
    ) -> ListedCommit: ...

    async def stage(self, commit: Commit, staging_dir: Path, *, max_rank: int) -> StagedAdapter: ...


class Results(Source, Protocol):
    """A source that has what runs have ended with, too: a bucket, and no proxy."""

    async def list_results(self) -> list[str]: ...

    async def read_result(
        self, key: str, *, run: str, public_key: bytes | None
    ) -> ListedCommit: ...


@asynccontextmanager
async def bucket_source(config: Config, run: str) -> AsyncIterator[BucketHost]:
    """The bucket of the configuration. One that has to be mounted gets a mount of its own, as an
    agent's may be another user's, and must not be in its way."""
    agent = structs.replace(config.agent, log_level="error")
    if not config.bucket.url:
        _check_bucket(config.bucket.path)
        async with BucketHost(config.bucket.path, run, agent).running() as host:
            yield host
        return
    async with _mounted(config) as point, BucketHost(point, run, agent).running() as host:
        yield host


@asynccontextmanager
async def _mounted(config: Config) -> AsyncIterator[str]:
    """The folder that the bucket is on. An agent waits for a store that is away; a person does
    not."""
    point = tempfile.mkdtemp(prefix="asyncgrpo-bucket-")
    own = replace(config, bucket=structs.replace(config.bucket, path=point))
    try:
        with trio.move_on_after(MOUNT_S) as waiting:
            async with bucket_mounted(own):
                waiting.deadline = inf
                yield point
    except SystemExit:  # a signal while it waited, which is no success here
        raise KeyboardInterrupt from None
    finally:
        with suppress(OSError):  # what is still mounted must not be deleted through it
            os.rmdir(point)
    if waiting.cancelled_caught:
        raise BucketUnavailableError(
            f"could not be mounted within {MOUNT_S:g} s",
            where=config.bucket.url,
            fix=f"See {config.state_dir / 'logs' / 'mount-s3.log'}",
        )


def _check_bucket(path: str) -> None:
    if not path:
        raise ConfigError("no bucket is configured", where="bucket.path", fix=NO_BUCKET)
    try:
        mode_of(path, LOOK_S)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            "is not there", where=f"bucket.path {path}", fix="Create it or mount it"
        ) from None
    except OSError:  # the bucket's own calls say it better
        return


# --- over the link ---------------------------------------------------------------------------


def goes_over_link(config: Config, wanted: bool) -> bool:
    """Whether the proxy is asked: if it is `wanted`, or there is a join and no bucket."""
    bucket = config.bucket
    has_bucket = bool(bucket.path or bucket.url) and bucket.source != "link"
    if config.join_line or not wanted:
        return bool(config.join_line) and (wanted or not has_bucket)
    raise ConfigError(
        "missing, and --over-link needs it",
        where="link.join",
        fix="Give the join file of any agent of the run: --join FILE",
    )


@asynccontextmanager
async def run_source(config: Config, run: str, *, over_link: bool) -> AsyncIterator[Source]:
    """The proxy of the join, or the bucket."""
    if over_link:
        async with link_source(config, run) as lent:
            yield lent
    else:
        async with bucket_source(config, run) as source:
            yield source


# --- what this host knows --------------------------------------------------------------------


def with_join(config: Config, stdin: TextIO) -> Config:
    """The configuration with its join line read, if it names any. Raises ConfigError."""
    if config.join_line or config.link.join:
        line = join_line(config, stdin)
        if decode(line).role == "viewer":
            raise ConfigError(
                "the join is for a viewer, who takes no adapters",
                where="link.join",
                fix="Give the join file of an agent of the run",
            )
        return replace(config, join_line=line)
    return config


def run_of_join(config: Config) -> str:
    return decode(config.join_line).run if config.join_line else ""


def public_key(config: Config, run: str) -> bytes | None:
    """The run's, from the join or from the run's folder on this host; None if neither has it."""
    if config.join_line and (join := decode(config.join_line)).run == run:
        return join.run_public_key
    known = {facts.name: facts.public_key for facts in identity.list_runs(config.state_dir)}
    return known.get(run)


def read_log(config: Config, run: str) -> AdapterLog | None:
    """What the trainer's agent has recorded; None if it did not run here."""
    log, path = AdapterLog(), history_file(config.state_dir, run)
    try:
        for record in history.read(path):
            log.add(record)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return log
