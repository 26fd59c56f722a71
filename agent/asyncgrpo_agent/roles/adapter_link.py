"""A run's adapters as the proxy of its join lends them, for a host without the bucket.

The proxy is dialled as an agent dials it: with the join's addresses and CA, through the site's HTTP
proxy. It has the versions in use only. It is trusted with none of them: list and bytes are checked
with the key of the join, as a replica does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from msgspec import structs

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapters import Attempt, parse_attempt, parse_commit_key, parse_name
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.commits import decode as decode_commit
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import (
    AdapterPrunedError,
    AdapterRefusedError,
    AgentError,
    ConfigError,
    LinkError,
    PeerProtocolError,
    StoreError,
)
from asyncgrpo_agent.net.control import ADAPTER, read_envelope
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.adapter_transfer import MORE_WINDOW_BYTES, read_sealed, store_adapter
from asyncgrpo_agent.roles.proxy_call import called
from asyncgrpo_agent.roles.registration import NEW_JOIN
from asyncgrpo_agent.store import staging
from asyncgrpo_agent.store.bucket import ListedCommit
from asyncgrpo_agent.store.mirror import Mirror
from asyncgrpo_agent.store.staging import StagedAdapter
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import StreamDeadlines
from asyncgrpo_agent.wire.headers import get_request, status_of

MAX_LIST_BYTES: Final = 16 << 20
MAX_TEXT_BYTES: Final = 4096
_LIST: Final = StreamDeadlines(first_byte_s=20.0, progress_s=20.0, total_s=60.0)
_DOWNLOAD: Final = StreamDeadlines(first_byte_s=90.0, progress_s=60.0)  # it may have to be brought
_GONE: Final = (404, 410)  # it was in use a moment ago, when it was listed
_LYING: Final = "See who runs the proxy, and what is in its mirror"


@asynccontextmanager
async def link_source(config: Config, run: str) -> AsyncIterator[LinkSource]:
    """Dial the proxy of the join and see what it has of the run. Raises LinkError, ConfigError."""
    join = decode(config.join_line)
    if join.run != run:
        raise ConfigError(
            f"the join is for run {join.run!r}, not for {run!r}",
            where="link.join",
            fix="Give a join file of the run, or a bucket that has it (--bucket, --bucket-url)",
        )
    async with called(config, join) as link:
        yield LinkSource(link, join, await _list(link, join))


# --- asking ----------------------------------------------------------------------------------


async def _list(link: Link, join: Join) -> m.AdapterList:
    async with await _get(link, join, "", _LIST) as stream:
        data = await _whole(stream, MAX_LIST_BYTES)
    try:
        shelf = msgspec.json.decode(data, type=m.AdapterList)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerProtocolError(f"a list that does not parse: {error}", where=link.peer) from error
    return structs.replace(shelf, adapters=[r for r in shelf.adapters if _is_of(r, join.run)])


def _is_of(row: m.ListedAdapter, run: str) -> bool:
    """Whether key and name are those of one adapter of the run, and all of it can be shown."""
    name, key = parse_name(row.adapter.name), parse_commit_key(row.commit)
    return (
        name is not None
        and key is not None
        and (name.run, name.attempt, name.version) == (run, key.attempt, key.version)
        and all(holder.isprintable() for holder in row.held_by)
    )


async def _get(link: Link, join: Join, key: str, deadlines: StreamDeadlines) -> LinkStream:
    """The stream of an answer whose body is what was asked for."""
    path = f"{m.ADAPTERS_PATH}/{join.run}" + (f"/{key}" if key else "")
    stream = await link.open(get_request(path, join.token), deadlines)
    try:
        await stream.end()
        status = status_of(await stream.response())
        if status != 200:
            text = (await _whole(stream, MAX_TEXT_BYTES)).decode(errors="replace").strip()
            said = "".join(c for c in text if c.isprintable())
            if key and status in _GONE:
                raise AdapterPrunedError(f"{key}: {said}", where=link.peer)
            raise _refusal(status, said, link.peer)
    except BaseException:
        stream.drop()
        raise
    return stream


async def _whole(stream: LinkStream, max_bytes: int) -> bytes:
    data = bytearray()
    while chunk := await stream.receive():
        data += chunk
        if len(data) > max_bytes:
            raise PeerProtocolError(f"an answer of over {max_bytes} bytes", where=stream.peer)
    return bytes(data)


def _refusal(status: int, text: str, peer: str) -> AgentError:
    if status == 401:
        return ConfigError(f"the proxy refused this join: {text}", where=peer, fix=NEW_JOIN)
    if not text:
        fix = "It may be older than this command; then take the adapter from the bucket"
        return LinkError(f"the proxy answers with HTTP status {status}", where=peer, fix=fix)
    return StoreError(text, where=peer)


# --- the source ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A download of which the commit has come."""

    stream: LinkStream
    envelope: m.AdapterBytes
    sealed: bytes
    rest: bytes


@dataclass(slots=True)
class LinkSource:
    """A `Source` of what the proxy listed; one that it does not hold it has the trainer bring."""

    link: Link
    join: Join
    shelf: m.AdapterList
    _begun: _Begun | None = None

    @property
    def peer(self) -> str:
        return self.link.peer

    async def list_runs(self) -> list[str]:
        return [self.join.run]

    async def list_attempts(self) -> list[Attempt]:
        keys = [parse_commit_key(row.commit) for row in self.shelf.adapters]
        attempts = {parse_attempt(key.attempt) for key in keys if key is not None}
        if not attempts:
            raise AgentError(
                f"the proxy {self.peer} has none of its adapters: it keeps those in use only",
                where=f"run {self.join.run}",
                fix="Take one from the bucket, or wait until a trainer has published",
            )
        return sorted(attempts)

    async def list_commits(
        self, attempt: str, after_version: int, *, whole: bool = False
    ) -> list[str]:
        found = [(parse_commit_key(row.commit), row.commit) for row in self.shelf.adapters]
        ours = [
            (parts.version, parts.retry, key)
            for parts, key in found
            if parts is not None and parts.attempt == attempt and parts.version > after_version
        ]
        return [key for _, _, key in sorted(ours, reverse=True)]

    def verified(self, row: m.ListedAdapter) -> Commit:
        """The commit of an adapter that the proxy holds. Raises AdapterRefusedError."""
        return self._verified(row.commit, row.sealed)

    def _verified(self, key: str, sealed: bytes) -> Commit:
        try:
            commit = decode_commit(sealed, run=self.join.run, public_key=self.join.run_public_key)
        except AdapterRefusedError as error:
            error.where = f"{self.peer}: {key}"
            raise
        if commit.adapter.name != self._row(key).adapter.name:
            raise self._foreign(f"has the commit of {commit.adapter.name}", key)
        return commit

    def _row(self, key: str) -> m.ListedAdapter:
        return next(row for row in self.shelf.adapters if row.commit == key)

    def _foreign(self, what: str, key: str) -> AdapterRefusedError:
        return AdapterRefusedError(what, where=f"{self.peer}: {key}", fix=_LYING)

    async def read_commit(self, key: str, *, run: str, public_key: bytes | None) -> ListedCommit:
        """From the list, else from the head of a download that `stage` then goes on with."""
        row = self._row(key)
        if row.sealed:
            return ListedCommit(key=key, commit=self.verified(row))
        begun = await self._begin(key)
        try:
            commit = self._verified(key, begun.sealed)
        except AdapterRefusedError:
            begun.stream.drop()
            raise
        self._begun = begun
        return ListedCommit(key=key, commit=commit)

    async def stage(self, commit: Commit, staging_dir: Path, *, max_rank: int) -> StagedAdapter:
        """By way of a mirror in `staging_dir`, as on a replica."""
        names = {row.adapter.name: row.commit for row in self.shelf.adapters}
        key, begun = names[commit.adapter.name], self._begun
        if begun is None or begun.envelope.commit != key:
            begun = await self._begin(key)
        root, run = staging_dir / "mirror", self.join.run
        mirror = Mirror(root, run, self.join.run_public_key, reserve_bytes=commit.total_bytes)
        async with begun.stream as stream:
            stream.widen(MORE_WINDOW_BYTES)
            await store_adapter(stream, mirror, begun.envelope, begun.sealed, begun.rest)
        if commit.adapter.name not in mirror:
            raise self._foreign(f"is not {commit.adapter.name}, which was listed", key)
        return await trio.to_thread.run_sync(
            partial(staging.stage, root / run, commit, staging_dir, max_rank=max_rank)
        )

    async def _begin(self, key: str) -> _Begun:
        """Ask for an adapter. The proxy answers one request at a time."""
        if self._begun is not None:
            self._begun.stream.drop()
            self._begun = None
        stream = await _get(self.link, self.join, key, _DOWNLOAD)
        try:
            envelope, rest = await read_envelope(stream, ADAPTER)
            if envelope.commit != key:
                raise self._foreign(f"comes as {envelope.commit!r:.200}", key)
            sealed, rest = await read_sealed(stream, envelope, rest)
        except BaseException:
            stream.drop()
            raise
        return _Begun(stream=stream, envelope=envelope, sealed=sealed, rest=rest)
