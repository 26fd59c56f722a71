"""Exchanges over httpcore's pool: TLS, the site's HTTP proxy, and whatever else lies on the way.

httpcore (1.0.9) uses a connection again on which more came than the answer, and takes that for the
answer to the next request. So here such a connection ends with its answer; see `_end_if_more`.
"""

from __future__ import annotations

import ssl
from typing import Any, Final, Self

import h11
import httpcore
import trio

from asyncgrpo_agent.net import exchanges
from asyncgrpo_agent.net.exchanges import (
    Answer,
    AnswerTooLargeError,
    ClosedEarlyError,
    HeaderLines,
    NoAnswerError,
)

_OPENED: Final = "connection.connect_tcp.complete"
_TRANSPORT_ERRORS: Final = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.ConnectionNotAvailable,
    httpcore.ProxyError,
)
_UNSENT: Final = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.ProxyError)


class PoolExchanger:
    """`url` is what requests' paths are added to. The pool ends with this."""

    def __init__(self, pool: httpcore.AsyncConnectionPool, url: str, *, connect_s: float) -> None:
        self._pool = pool
        self._url = url
        self._timeout = {"connect": connect_s}

    async def exchange(self, method: str, path: str, headers: HeaderLines, body: bytes) -> Answer:
        fresh = False

        async def note_opening(event: str, _: dict[str, Any]) -> None:
            nonlocal fresh
            fresh = fresh or event == _OPENED

        request = httpcore.Request(
            method,
            f"{self._url}{path}",
            headers=[*headers, ("content-length", str(len(body)))],
            content=_Body(body),
            extensions={"trace": note_opening, "timeout": self._timeout},
        )
        try:
            return await self._exchange(request)
        except _NoHeadError as error:
            raise ClosedEarlyError(_reason(error.__cause__), fresh=fresh) from error
        except _TRANSPORT_ERRORS as error:
            sent = not isinstance(error, _UNSENT)
            raise NoAnswerError(_reason(error), sent=sent) from error

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):  # closing does not wait for the peer
            await self._pool.aclose()

    async def _exchange(self, request: httpcore.Request) -> Answer:
        try:
            response = await self._pool.handle_async_request(request)
        except (httpcore.ReadError, httpcore.RemoteProtocolError) as error:
            raise _NoHeadError from error
        try:
            content = await _read(response)
            _end_if_more(response)
        finally:
            await response.aclose()
        headers = {name.lower(): value for name, value in response.headers}
        kind = headers.get(b"content-type", b"").decode("latin-1")
        return Answer(response.status, kind, content)


def _end_if_more(response: httpcore.Response) -> None:
    """Have the connection closed with the answer, if there are bytes behind it.

    h11 knows them, and httpcore shows its h11 to nobody: the names are those of 1.0.9. The stream
    is the pool's own, around that of the connection.
    """
    stream: Any = response.stream
    state: h11.Connection = stream._stream._connection._h11_state
    if state.trailing_data[0]:
        state.send_failed()  # neither side of a connection that failed is used again


class _NoHeadError(Exception):
    """The connection ended before the head of an answer came."""


class _Body:
    """A request's body. httpcore's own is a generator, which a failed write would leave behind for
    the garbage collector and trio to complain about."""

    def __init__(self, data: bytes) -> None:
        self._parts = [data]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.pop()


async def _read(response: httpcore.Response) -> bytes:
    """The body. Too large a one is cut by closing the connection under httpcore's generators,
    which end at their next read; left half-way, they would wait for the garbage collector."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in response.aiter_stream():
            size += len(chunk)
            if size > exchanges.MAX_ANSWER_BYTES:
                await response.aclose()
            else:
                chunks.append(chunk)
    except httpcore.ReadError:
        if size <= exchanges.MAX_ANSWER_BYTES:
            raise
    if size > exchanges.MAX_ANSWER_BYTES:
        raise AnswerTooLargeError(exchanges.MAX_ANSWER_BYTES)
    return b"".join(chunks)


def _reason(error: BaseException | None) -> str:
    """The first words that the error or one of its causes has."""
    kind = type(error).__name__
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {error.verify_message}"
        if str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return kind
