"""A small HTTP/1.1 server over trio streams: whole bodies in, whole bodies out.

Two tasks a connection. One reads, whatever the other does, so that a client's leaving is seen while
a handler runs: the handler is then cancelled, so that generation is aborted upstream. A client that
shuts down its sending side before it has its answer counts as gone. Plain requests, nearly all, are
taken from what was read at once (`http1_heads`); any other goes through h11.

Invariants: no failure of one connection or handler reaches another, or the listener; every wait on
a client has a deadline, except the wait for our own handler. Handlers raise AgentError for what
went wrong, anything else is a bug of ours and answered 500 with the traceback logged.

It must not know what is served, and it streams nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

import h11
import msgspec
import trio

from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net.http1_heads import PlainHead, read_head, write_head
from asyncgrpo_agent.net.socket_stream import DirectStream

JSON: Final = "application/json"
_READ_BYTES: Final = 64 << 10
_PLAIN_BODY_BYTES: Final = 128 << 10  # larger ones are not kept in one piece before they are whole
_AHEAD_BYTES: Final = 256 << 10  # beyond, nothing more is read and TCP pushes back
_LINGER_S: Final = 2.0
_LOOK_S: Final = 5.0  # how late the end of a wait may be noticed

log = Log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may take. `idle_s` exceeds the 15 s that aiohttp keeps a connection pooled."""

    header_bytes: int = 32 << 10
    body_bytes: int = 16 << 20
    idle_s: float = 75.0
    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 60.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One whole request. Header names are lower case; repeated ones are joined with commas."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer; content-type and content-length are added to `headers`."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Awaitable[Response]]


def json_response(status: int, value: Any) -> Response:
    return Response(status=status, content_type=JSON, body=msgspec.json.encode(value))


def error_response(
    status: int, message: str, *, kind: str, hop: str, may_have_run: bool = False
) -> Response:
    """An error as vLLM words it, plus the hop that made it and whether anything was tried."""
    error = {
        "message": message,
        "type": kind,
        "code": status,
        "hop": hop,
        "may_have_run": may_have_run,
    }
    return json_response(status, {"error": error})


async def serve(
    listeners: Sequence[trio.abc.Listener[trio.SocketStream]],
    handler: Handler,
    *,
    hop: str,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on `listeners` until cancelled. `hop` names this server in the errors it answers."""

    async def serve_one(stream: trio.SocketStream) -> None:
        await serve_connection(DirectStream(stream), handler, hop=hop, limits=limits)

    await trio.serve_listeners(serve_one, list(listeners), task_status=task_status)


async def serve_connection(
    stream: trio.abc.HalfCloseableStream,
    handler: Handler,
    *,
    hop: str,
    limits: Limits | None = None,
) -> None:
    """Serve one connection to its end and close it; raises nothing but trio.Cancelled."""
    async with stream:
        await _Connection(stream, handler, hop, limits or Limits()).serve()


class _RefusedRequestError(Exception):
    """The client's request is cut, slow, malformed or too large."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Connection:
    """One connection. `_received` is what was read and nobody has taken yet."""

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, handler: Handler, hop: str, limits: Limits
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._hop = hop
        self._limits = limits
        self._received = bytearray()
        self._ended = False  # the client sends no more
        self._arrivals = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._scope: trio.CancelScope  # of the connection
        self._due = math.inf  # of the wait on the client that is under way
        self._handling = False
        self._plain = True  # the request at hand
        self._head_only = False  # its answer has no body
        self._h11 = self._new_h11()  # of a request that is not

    def _new_h11(self) -> h11.Connection:
        return h11.Connection(
            our_role=h11.SERVER, max_incomplete_event_size=self._limits.header_bytes
        )

    async def serve(self) -> None:
        """To the connection's end; raises nothing but trio.Cancelled."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._read)
            nursery.start_soon(self._keep)
            try:
                while await self._serve_request():
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                log.debug("http.client_lost", hop=self._hop)
            except Exception:  # the border of this connection: no bug in it may harm another
                log.exception("http.connection_failed", hop=self._hop)
            nursery.cancel_scope.cancel()

    async def _serve_request(self) -> bool:
        """One request and its answer; False when the connection is over."""
        try:
            request = await self._read_request()
        except _RefusedRequestError as refusal:
            await self._refuse(refusal)
            return False
        if request is None:
            return False
        if self._ended:
            log.debug("http.client_gone", hop=self._hop, path=request.path)
            return False
        self._handling = True
        response = await self._answer(request)
        self._handling = False
        if self._plain:
            await self._write(write_head(response.status, _headers(response)) + response.body)
            return True
        await self._send(response)
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._received[:0] = self._h11.trailing_data[0]
        self._h11 = self._new_h11()
        return True

    async def _keep(self) -> None:
        """End the connection when the client makes us wait too long.

        It looks now and then, since moving a deadline of trio's at every turn of every request
        costs as much as parsing one.
        """
        while (left_s := self._due - trio.current_time()) > 0:  # noqa: ASYNC110 - see above
            await trio.sleep(min(left_s, _LOOK_S))
        self._scope.cancel()

    # --- reading -----------------------------------------------------------------------------

    async def _read(self) -> None:
        """The stream's only reader. Its end is the connection's, handler and all, if one runs."""
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                self._received += data
                self._arrivals.unpark_all()
                while len(self._received) >= _AHEAD_BYTES:
                    await self._room.park()
        except trio.BrokenResourceError:
            pass
        self._ended = True
        self._arrivals.unpark_all()
        if self._handling:
            log.debug("http.client_gone", hop=self._hop)
            self._scope.cancel()

    async def _more(self) -> bool:
        """Wait until more was read; False at the client's end."""
        if not self._ended:
            await self._arrivals.park()
        return not self._ended

    def _take(self, size_bytes: int) -> bytes:
        data = bytes(self._received[:size_bytes])
        del self._received[:size_bytes]
        self._room.unpark_all()
        return data

    async def _read_request(self) -> Request | None:
        """The next request, or None if the client has none."""
        if not self._received:
            self._due = trio.current_time() + self._limits.idle_s
            await self._more()
        self._due = math.inf
        if not self._received:
            return None
        try:
            return await self._read_plain() or await self._read_any()
        except trio.TooSlowError as error:
            raise _RefusedRequestError(408, "the request took too long to arrive") from error
        except h11.RemoteProtocolError as error:
            raise _RefusedRequestError(error.error_status_hint, str(error)) from error

    async def _read_plain(self) -> Request | None:
        """None, and nothing is taken, if it is no plain request."""
        head = read_head(self._received, self._limits.header_bytes)
        if head is None or head.body_bytes > min(_PLAIN_BODY_BYTES, self._limits.body_bytes):
            return None
        if len(self._received) < head.head_bytes + head.body_bytes:
            with trio.fail_after(self._limits.body_s):
                while len(self._received) < head.head_bytes + head.body_bytes:
                    if not await self._more():
                        return None
        self._plain = True
        self._take(head.head_bytes)
        return _plain_request(head, self._take(head.body_bytes))

    async def _read_any(self) -> Request | None:
        self._plain = self._head_only = False
        with trio.fail_after(self._limits.header_s):
            head = await self._next_event()
        if not isinstance(head, h11.Request):
            return None
        self._head_only = head.method == b"HEAD"
        if doubt := _doubt(head):
            raise _RefusedRequestError(400, doubt)
        with trio.fail_after(self._limits.body_s):
            body = await self._read_body(head)
        return _request(head, body)

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]  # h11's union holds both sentinels
            if self._h11.they_are_waiting_for_100_continue:
                proceed = h11.InformationalResponse(status_code=100, headers=[])
                await self._stream.send_all(self._h11.send(proceed) or b"")
            if not self._received:
                await self._more()
            self._h11.receive_data(self._take(_READ_BYTES))

    async def _read_body(self, head: h11.Request) -> bytes:
        limit = self._limits.body_bytes
        declared = dict(head.headers).get(b"content-length", b"0")
        too_large = _RefusedRequestError(413, f"the body is over the limit of {limit} bytes")
        if int(declared) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while isinstance(event := await self._next_event(), h11.Data):
            size += len(event.data)
            if size > limit:
                raise too_large
            chunks.append(bytes(event.data))
        return b"".join(chunks)

    # --- answering ---------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except AgentError as error:
            status = 503 if error.retryable else 500
            kind = type(error).__name__
            log.warning("http.failed", hop=self._hop, path=request.path, error=error)
            return error_response(status, str(error), kind=kind, hop=self._hop, may_have_run=True)
        except Exception:  # the border of one request: the server lives on
            log.exception("http.handler_failed", hop=self._hop, path=request.path)
            message = "an internal error; the agent's log has the traceback"
            return error_response(
                500, message, kind="InternalError", hop=self._hop, may_have_run=True
            )

    async def _send(self, response: Response, *, close: bool = False) -> None:
        headers = _headers(response)
        if close:
            headers.append(("connection", "close"))
        events: list[h11.Event] = [h11.Response(status_code=response.status, headers=headers)]
        if response.body and not self._head_only:
            events.append(h11.Data(data=response.body))
        events.append(h11.EndOfMessage())
        output = b"".join(self._h11.send(event) or b"" for event in events)
        await self._write(output)

    async def _write(self, output: bytes) -> None:
        """A client that does not read its answer in time loses the connection."""
        self._due = trio.current_time() + self._limits.write_s
        await self._stream.send_all(output)

    async def _refuse(self, refusal: _RefusedRequestError) -> None:
        """Answer if the protocol still allows it, then read on for a moment.

        Closing with unread bytes makes the kernel reset the connection, which can take the answer
        away from a client that is still sending.
        """
        log.debug("http.refused", hop=self._hop, status=refusal.status, reason=refusal)
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        response = error_response(
            refusal.status, str(refusal), kind="BadRequestError", hop=self._hop
        )
        await self._send(response, close=True)
        with trio.move_on_after(_LINGER_S):
            await self._stream.send_eof()
            reads_on = True
            while reads_on:
                self._take(len(self._received))  # first: a full buffer keeps anything from coming
                reads_on = await self._more()


def _headers(response: Response) -> list[tuple[str, str]]:
    return [
        ("content-type", response.content_type),
        ("content-length", str(len(response.body))),
        *response.headers,
    ]


def _doubt(head: h11.Request) -> str:
    """Why another reader could see another end of this request (RFC 9112, 2.3 and 6.1)."""
    version, names = head.http_version, {name for name, _ in head.headers}
    if version not in (b"1.0", b"1.1"):
        return f"HTTP/{version.decode()} is not spoken here, 1.1 is"
    if b"transfer-encoding" in names and (b"content-length" in names or version == b"1.0"):
        return "transfer-encoding goes with neither a content-length nor HTTP/1.0"
    return ""


def _plain_request(head: PlainHead, body: bytes) -> Request:
    path, _, query = head.target.partition("?")
    return Request(
        method=head.method,
        path=path,
        query=dict(parse_qsl(query, keep_blank_values=True)) if query else {},
        headers=head.headers,
        body=body,
    )


def _request(head: h11.Request, body: bytes) -> Request:
    path, _, query = head.target.decode("ascii").partition("?")
    headers: dict[str, str] = {}
    for raw_name, raw_value in head.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(
        method=head.method.decode("ascii"),
        path=path,
        query=dict(parse_qsl(query, keep_blank_values=True)),
        headers=headers,
        body=body,
    )
