"""HTTP/1.1 to a server on this host's Unix socket, by the shortest way.

A general client costs a replica's agent more than all else that it does for a rollout. This one
sends a request in one piece and takes the answer from what was read, if it is a plain one (a length
and nothing unusual, which is all that vLLM sends for a rollout); any other goes through h11. A
connection is kept for the next request only after an answer about whose end there is no doubt, and
used only if nothing has come on it since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import h11
import trio

from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.exchanges import (
    Answer,
    AnswerTooLargeError,
    ClosedEarlyError,
    HeaderLines,
    NoAnswerError,
)
from asyncgrpo_agent.net.http1_heads import PlainAnswer, read_answer_head, write_request_head
from asyncgrpo_agent.net.socket_stream import DirectStream

KEEP_S: Final = 3.0  # uvicorn closes idle connections after 5 s
MAX_IDLE: Final = 16  # a Unix connect is cheap
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_INTERIM: Final = 100  # answers of 1xx before the one
_READ_BYTES: Final = 64 << 10


class UnixExchanger:
    """One server. It may come and go: connections are opened when they are needed."""

    def __init__(self, path: str, *, clock: Callable[[], float] = trio.current_time) -> None:
        self._path = path
        self._clock = clock
        self._idle: deque[tuple[DirectStream, float]] = deque()  # the one used last at the end

    async def exchange(self, method: str, path: str, headers: HeaderLines, body: bytes) -> Answer:
        try:
            head = _head(method, path, headers, len(body))
        except ValueError as error:
            raise NoAnswerError(str(error), sent=False) from error
        kept = await self._take()
        stream = kept or await self._connect()
        reusable = False
        try:
            exchange = _Exchange(stream, fresh=kept is None)
            answer, reusable = await exchange.run(method, head + body)
            return answer
        finally:
            if not reusable:
                await trio.aclose_forcefully(stream)
            else:
                await self._keep(stream)

    async def aclose(self) -> None:
        while self._idle:
            await trio.aclose_forcefully(self._idle.pop()[0])

    async def _connect(self) -> DirectStream:
        try:
            return DirectStream(await trio.open_unix_socket(self._path))
        except OSError as error:
            raise NoAnswerError(str(error), sent=False) from error

    async def _take(self) -> DirectStream | None:
        """The one that was used last, if the server has it open still."""
        while self._idle:
            stream, since = self._idle.pop()
            if self._clock() - since >= KEEP_S:
                await trio.aclose_forcefully(stream)
                await self.aclose()  # the others are older
            elif stream.has_input():  # its end, or an answer that nobody asked for
                await trio.aclose_forcefully(stream)
            else:
                return stream
        return None

    async def _keep(self, stream: DirectStream) -> None:
        self._idle.append((stream, self._clock()))
        if len(self._idle) > MAX_IDLE:
            oldest, _ = self._idle.popleft()
            await trio.aclose_forcefully(oldest)


def _head(method: str, path: str, headers: HeaderLines, body_bytes: int) -> bytes:
    return write_request_head(method, path, [*headers, ("content-length", str(body_bytes))])


class _Exchange:
    """One request on one connection. `_received` is what was read of the answer."""

    def __init__(self, stream: DirectStream, *, fresh: bool) -> None:
        self._stream = stream
        self._fresh = fresh
        self._received = bytearray()
        self._ended = False

    async def run(self, method: str, request: bytes) -> tuple[Answer, bool]:
        """The answer, and whether the connection can be used again."""
        try:
            await self._stream.send_all(request)
        except trio.BrokenResourceError as error:
            # It may have answered before it closed: a refusal that did not wait for the body.
            if not await self._more():
                raise ClosedEarlyError(str(error), fresh=self._fresh) from error
        while (head := read_answer_head(self._received, _MAX_HEAD_BYTES)) is None:
            if b"\r\n\r\n" in self._received or len(self._received) > _MAX_HEAD_BYTES:
                return await self._read_any(method)
            if not await self._more():
                raise ClosedEarlyError("the server closed the connection", fresh=self._fresh)
        return await self._read_plain(head)

    async def _more(self) -> bool:
        """Read on; False at the end, orderly or not."""
        try:
            data = await self._stream.receive_some(_READ_BYTES)
        except trio.BrokenResourceError:
            data = b""
        self._received += data
        self._ended = not data
        return bool(data)

    async def _read_plain(self, head: PlainAnswer) -> tuple[Answer, bool]:
        if head.body_bytes > exchanges.MAX_ANSWER_BYTES:
            raise AnswerTooLargeError(exchanges.MAX_ANSWER_BYTES)
        end = head.head_bytes + head.body_bytes
        while len(self._received) < end:
            if not await self._more():
                raise NoAnswerError("the answer was cut short", sent=True)
        body = bytes(memoryview(self._received)[head.head_bytes : end])
        content_type = head.headers.get("content-type", "")
        return Answer(head.status, content_type, body), len(self._received) == end

    async def _read_any(self, method: str) -> tuple[Answer, bool]:
        """An answer in pieces, without a length, or with anything else that HTTP/1.1 knows."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "vllm")]))
        parser.send(h11.EndOfMessage())
        head: h11.Response | None = None
        parts, size_bytes, interim = [], 0, 0
        try:
            while not isinstance(event := await self._next_event(parser), h11.EndOfMessage):
                if isinstance(event, h11.InformationalResponse):
                    interim += 1
                    if interim > _MAX_INTERIM:
                        raise NoAnswerError("interim answers without end", sent=True)
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                    size_bytes += len(event.data)
                    if size_bytes > exchanges.MAX_ANSWER_BYTES:
                        raise AnswerTooLargeError(exchanges.MAX_ANSWER_BYTES)
        except h11.RemoteProtocolError as error:
            raise NoAnswerError(str(error), sent=True) from error
        assert head is not None  # h11 ends no message that has not begun
        kind = dict(head.headers).get(b"content-type", b"").decode("latin-1")
        is_done = parser.their_state is h11.DONE and not self._ended
        reusable = is_done and not parser.trailing_data[0]
        return Answer(head.status_code, kind, b"".join(parts)), reusable

    async def _next_event(self, parser: h11.Connection) -> h11.Event:
        while True:
            event = parser.next_event()
            if isinstance(event, h11.ConnectionClosed):
                raise NoAnswerError("the server closed the connection", sent=True)
            if isinstance(event, h11.Event):
                return event
            if not self._received:
                await self._more()
            parser.receive_data(bytes(self._received))  # nothing is the end
            self._received.clear()
