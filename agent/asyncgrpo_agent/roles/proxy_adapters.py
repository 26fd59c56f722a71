"""The proxy's adapters for whoever holds a token of their run: a list, and each as a download.

    GET /.agrpo/adapters/RUN            an `AdapterList`, JSON
    GET /.agrpo/adapters/RUN/KEY        the adapter of that commit, as an adapter stream carries it
    GET /.agrpo/adapters/RUN/record     what its trainer says that the run is, sealed; see
                                        `core.run_record`

The token, of a replica or a trainer, comes as `authorization: Bearer`; it is never logged, and no
use of it is counted. Whoever shows none that is valid for the run is told so and cut off, whether
there is such a run or not. A link with a valid one is no stranger's any more, is closed when the
token ends, and gets its deadlines and limits here: one request at a time, which has to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import trio

from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.errors import AdapterPrunedError, ConfigError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.adapter_transfer import pour
from asyncgrpo_agent.roles.proxy_admission import PING_DEADLINE_S, PING_S, Admission
from asyncgrpo_agent.roles.proxy_mirror import Mirrors, RunMirror
from asyncgrpo_agent.roles.proxy_records import RunRecords
from asyncgrpo_agent.roles.proxy_run import Runs
from asyncgrpo_agent.store import tokens
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import READERS
from asyncgrpo_agent.wire.headers import bearer_of, method_of, path_of, response
from asyncgrpo_agent.wire.limits import AUTHENTICATED, PRE_AUTH, Limits

log = Log(__name__)

MAX_DOWNLOADS: Final = 32  # open files, and shares of the proxy's line
IDLE_S: Final = 30.0  # after which a link that asks for nothing is closed
_PREFIX: Final = f"{m.ADAPTERS_PATH}/"
_LIST_RESPONSE: Final = response(200, "application/json")
_BYTES_RESPONSE: Final = response(200, "application/octet-stream")
_LIMITS: Final[Limits] = replace(
    PRE_AUTH, control_frames=AUTHENTICATED.control_frames, idle_frames=AUTHENTICATED.idle_frames
)


def is_asked_for(path: str) -> bool:
    return path.startswith(_PREFIX)


@dataclass(slots=True)
class Lending:
    """What one proxy lends to readers."""

    admission: Admission
    mirrors: Mirrors
    runs: Runs
    records: RunRecords
    downloads: int = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        self.downloads += 1
        try:
            yield
        finally:
            self.downloads -= 1


@dataclass(slots=True)
class Reader:
    """One connection that asks for adapters; until a token was shown, a stranger's."""

    lending: Lending
    link: Link
    is_known: bool = False
    _requests: int = 0
    _known: trio.Event = field(default_factory=trio.Event)

    async def serve(self, stream: LinkStream) -> None:
        run, _, key = path_of(stream.request_headers).removeprefix(_PREFIX).partition("/")
        if method_of(stream.request_headers) != "GET" or not is_run_name(run):
            await _say(stream, 404, "there is nothing of that name")
            return
        token = bearer_of(stream.request_headers)
        fault = "a token is needed"
        if token and not (fault := self.lending.admission.admit_reader(self.link, token, run)):
            self._admit(stream)
            await self._answer(stream, run, key)
            return
        if token:
            told = {"peer": self.link.peer, "run": run, "token": tokens.token_id(token)}
            self.lending.admission.note_refusal("reader.refused", fault, **told, reason=fault)
        await _say(stream, 401, fault)
        await self.link.aclose("refused")

    def _admit(self, stream: LinkStream) -> None:
        if not self.is_known:
            self.is_known = True
            self.link.authenticated(_LIMITS, PING_S, PING_DEADLINE_S, READERS)
            self.link.limit(stream, READERS)
            self._known.set()
        self._requests += 1

    async def leave_when_idle(self) -> None:
        """Close a link whose owner, once known, asks for nothing any more."""
        await self._known.wait()
        while True:
            before = self._requests
            await trio.sleep(IDLE_S)
            if self._requests == before and not self.link.open_streams:
                await self.link.aclose("nothing more was asked for")
                return

    async def _answer(self, stream: LinkStream, run: str, key: str) -> None:
        if key == m.RECORD_KEY:
            await self._tell_record(stream, self.lending.records.of(run))
            return
        mirror = self.lending.mirrors.of(self.lending.runs.open(run))
        shelf = await mirror.shelf()
        if not key:
            await stream.respond(_LIST_RESPONSE)
            await stream.send(msgspec.json.encode(shelf))
            await stream.end()
            return
        names = [row.adapter.name for row in shelf.adapters if row.commit == key]
        if not names:
            await _say(stream, 404, "the proxy knows of no such adapter that is in use")
        elif self.lending.downloads >= MAX_DOWNLOADS:
            await _say(stream, 503, f"{MAX_DOWNLOADS} downloads are under way; try again later")
        else:
            await self._lend(stream, mirror, names[0])

    async def _tell_record(self, stream: LinkStream, record: bytes) -> None:
        if not record:
            await _say(stream, 404, "no trainer of the run has come yet")
            return
        await stream.respond(_BYTES_RESPONSE)
        await stream.send(record)
        await stream.end()

    async def _lend(self, stream: LinkStream, mirror: RunMirror, name: str) -> None:
        began = trio.current_time()
        with self.lending.one_more():
            try:
                source = await mirror.lend(name)
            except AdapterPrunedError as error:
                await _say(stream, 410, str(error))
                return
            except (StoreError, ConfigError) as error:
                log.warning("adapter.unlent", peer=self.link.peer, adapter=name, reason=str(error))
                await _say(stream, 503, str(error))
                return
            try:
                await stream.respond(_BYTES_RESPONSE)
                await pour(stream, source)
            finally:
                source.close()
        seconds = trio.current_time() - began
        log.info("adapter.lent", peer=self.link.peer, adapter=name, seconds=seconds)
        self.lending.admission.record_of(self.link, "adapter.lent", adapter=name)


async def _say(stream: LinkStream, status: int, text: str) -> None:
    await stream.respond(response(status, "text/plain; charset=utf-8"))
    await stream.send(f"{text}\n".encode())
    await stream.end()
