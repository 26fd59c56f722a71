"""Which adapters of a run there are, as anybody with its bucket sees it, or with a join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapter_log import AdapterLog
from asyncgrpo_agent.core.adapters import Attempt, parse_commit_key
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.errors import (
    AdapterPrunedError,
    AdapterRefusedError,
    AgentError,
    BucketUnavailableError,
    StoreError,
    UsageError,
)
from asyncgrpo_agent.roles.adapter_link import LinkSource, link_source
from asyncgrpo_agent.roles.adapter_sources import (
    Source,
    bucket_source,
    public_key,
    read_log,
    run_of_join,
)
from asyncgrpo_agent.wire import messages as m

MAX_TRIED: Final = 20  # with the wrong key no commit of a long run can be read
_ANY_RUN: Final = "-"  # cannot be the name of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One version. Without a commit there is a `problem` with all that it has, or it is one that
    the proxy knows of and does not hold: then its `adapter` is what the proxy says."""

    key: str
    commit: Commit | None = None
    problem: str = ""
    adapter: m.Adapter | None = None
    held_by: list[str] | None = None  # as the proxy sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAdapters:
    """Versions, oldest first; `log` is there on the trainer's host only. `proxy` and `live` are of
    a proxy that was asked."""

    run: str
    found: list[Found]
    verified: bool
    log: AdapterLog | None
    proxy: str = ""
    live: list[str] | None = None


async def list_adapters(config: Config, run: str, limit: int, *, over_link: bool) -> RunAdapters:
    """The newest `limit` versions. Without a name: the run of the join, or the only one."""
    run = run or config.run.name or run_of_join(config)
    if over_link:
        return await _list_of_proxy(config, run, limit)
    if not run:
        async with bucket_source(config, _ANY_RUN) as source:
            run = _only(await source.list_runs(), config)
    key = public_key(config, run)
    async with bucket_source(config, run) as source:
        found = await RunReader(source, run, key).newest(limit)
    return RunAdapters(run=run, found=found, verified=key is not None, log=read_log(config, run))


async def _list_of_proxy(config: Config, run: str, limit: int) -> RunAdapters:
    async with link_source(config, run) as source:
        rows = {row.commit: row for row in source.shelf.adapters}
        keys = [
            key
            for attempt in await source.list_attempts()
            for key in reversed(await source.list_commits(str(attempt), -1))
        ]
        found = [_lent(source, rows[key]) for key in keys[-limit:]]
    return RunAdapters(
        run=run,
        found=found,
        verified=True,
        log=read_log(config, run),
        proxy=source.peer,
        live=source.shelf.live,
    )


def _lent(source: LinkSource, row: m.ListedAdapter) -> Found:
    found = partial(Found, key=row.commit, held_by=row.held_by)
    if not row.sealed:
        return found(adapter=row.adapter)
    try:
        return found(commit=source.verified(row))
    except AdapterRefusedError as error:
        return found(problem=str(error))


def _only(runs: Sequence[str], config: Config) -> str:
    where = config.bucket.url or config.bucket.path
    if not runs:
        raise AgentError("holds no run", where=where, fix="See whether this is the right bucket")
    if len(runs) > 1:
        raise UsageError(f"holds {len(runs)} runs: {', '.join(runs)}", where=where, fix="Name one")
    return runs[0]


@dataclass(frozen=True, slots=True)
class RunReader:
    """One run in one source. Without a key signatures are not checked."""

    source: Source
    run: str
    public_key: bytes | None

    async def newest(self, limit: int) -> list[Found]:
        """Of all attempts, oldest first; of a version that was published twice the later."""
        found: list[Found] = []
        for attempt in reversed(await self._attempts()):
            for keys in (await self._versions(str(attempt))).values():
                if len(found) == limit:
                    return found[::-1]
                found.append(await self._found(keys))
        return found[::-1]

    async def attempt(self, name: str) -> tuple[str, dict[int, list[str]]]:
        """The one of that name, else the newest that has published, and its commits by version."""
        attempts = [str(attempt) for attempt in reversed(await self._attempts())]
        for one in attempts if not name else [name] * (name in attempts):
            if versions := await self._versions(one):
                return one, versions
        what = f"attempt {name} has published nothing" if name else "has published nothing"
        raise AgentError(
            what,
            where=f"run {self.run}",
            fix=f"Attempts that left anything: {', '.join(attempts)}",
        )

    async def first_readable(self, keys: Sequence[str]) -> Commit:
        """What cannot be read does not hide the next, as on a replica. Raises StoreError."""
        problem: StoreError | None = None
        for key in keys[:MAX_TRIED]:
            try:
                listed = await self.source.read_commit(
                    key, run=self.run, public_key=self.public_key
                )
            except AdapterPrunedError:
                raise  # older ones have gone as well
            except AdapterRefusedError as error:
                problem = problem or error
            except BucketUnavailableError as error:
                await self.source.list_attempts()  # a mount that is gone or hangs says so here
                problem = problem or error
            else:
                return listed.commit
        assert problem is not None, "there is a key"
        raise problem

    async def _found(self, keys: Sequence[str]) -> Found:
        try:
            return Found(key=keys[0], commit=await self.first_readable(keys))
        except (AdapterRefusedError, BucketUnavailableError) as error:
            await self.source.list_attempts()
            return Found(key=keys[0], problem=str(error))

    async def _attempts(self) -> list[Attempt]:
        attempts = await self.source.list_attempts()
        if not attempts:
            runs = ", ".join(await self.source.list_runs())
            raise AgentError(
                "is not in the bucket",
                where=f"run {self.run}",
                fix=f"Runs that are: {runs or 'none'}",
            )
        return attempts

    async def _versions(self, attempt: str) -> dict[int, list[str]]:
        """The keys of each version, newest first."""
        versions: dict[int, list[str]] = {}
        for key in await self.source.list_commits(attempt, -1, whole=True):
            if (parts := parse_commit_key(key)) is not None:
                versions.setdefault(parts.version, []).append(key)
        return versions
