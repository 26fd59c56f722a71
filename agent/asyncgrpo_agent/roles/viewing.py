"""What the proxy shows to the holder of a viewer's join: its API, and live messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TextIO

import msgspec

from asyncgrpo_agent.config.host import join_line
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.event_stream import EventReader, ServerEvent
from asyncgrpo_agent.core.join import Join, decode
from asyncgrpo_agent.errors import AgentError, ConfigError, PeerProtocolError
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.roles.proxy_call import called
from asyncgrpo_agent.wire.deadlines import StreamDeadlines
from asyncgrpo_agent.wire.headers import get_request, status_of

MAX_ANSWER_BYTES: Final = 64 << 20
ASKED: Final = StreamDeadlines(first_byte_s=20.0, progress_s=20.0, total_s=60.0)
LIVE: Final = StreamDeadlines(first_byte_s=20.0, progress_s=45.0)  # it says so every 15 s
_HOW: Final = (
    "On the proxy's host: asyncgrpo-agent token create --role viewer --output viewer.join; then"
    " --join viewer.join here"
)


def viewer_join(config: Config, stdin: TextIO) -> Join:
    """The join of a viewer. Raises ConfigError."""
    if not (config.join_line or config.link.join):
        raise ConfigError("missing", where="link.join", fix=_HOW)
    join = decode(join_line(config, stdin))
    if join.role != "viewer":
        what = f"the join is for a {join.role}, who is shown nothing"
        raise ConfigError(what, where="link.join", fix=_HOW)
    return join


@dataclass(slots=True)
class Viewing:
    """A link to the proxy of a viewer's join. `run` is that of the join, "" if it is for all."""

    link: Link
    token: str

    async def get(self, path: str) -> Any:
        """The JSON at `path`, as /api/runs. Raises AgentError."""
        async with await self.link.open(get_request(path, self.token), ASKED) as stream:
            await stream.end()
            status = status_of(await stream.response())
            body = bytearray()
            while chunk := await stream.receive():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    what = f"an answer of over {MAX_ANSWER_BYTES} bytes"
                    raise PeerProtocolError(what, where=stream.peer)
        return _content(status, bytes(body), path, self.link.peer)

    async def follow(self, path: str, take: Callable[[ServerEvent], None]) -> None:
        """Live messages, one by one, until the stream ends. Raises AgentError."""
        async with await self.link.open(get_request(path, self.token), LIVE) as stream:
            await stream.end()
            status = status_of(await stream.response())
            if status != 200:
                _content(status, bytes(await stream.receive()), path, self.link.peer)
            reader = EventReader()
            while chunk := await stream.receive():
                for event in _events(reader, bytes(chunk), stream):
                    take(event)


def _events(reader: EventReader, chunk: bytes, stream: LinkStream) -> list[ServerEvent]:
    try:
        return reader.feed(chunk)
    except ValueError as error:
        raise PeerProtocolError(str(error), where=stream.peer) from error


def _content(status: int, body: bytes, path: str, peer: str) -> Any:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        what = f"an answer to {path} that does not parse (HTTP status {status})"
        raise PeerProtocolError(what, where=peer) from error
    if status == 200:
        return value
    told = value if isinstance(value, dict) else {}
    what, fix = str(told.get("error", f"HTTP status {status}")), str(told.get("fix", ""))
    if status in (401, 403):
        raise ConfigError(f"the proxy refuses: {what}", where=peer, fix=fix or _HOW)
    raise AgentError(f"{path}: {what}", where=peer, fix=fix)


@asynccontextmanager
async def viewing(config: Config, join: Join) -> AsyncIterator[Viewing]:
    """Dial the proxy of the join. Raises LinkError, ConfigError."""
    async with called(config, join) as link:
        yield Viewing(link, join.token)
