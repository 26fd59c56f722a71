"""A server's URL as the proxy's other parts see a replica: a link, streams, a control channel.

They speak as to an agent, and the agent's part is played within this process: what is told goes to
`obey`, a rollout to `answer`. Nothing is queued, and nobody but the asking task waits for an
answer, so cancelling that task cancels the request at the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import trio

from asyncgrpo_agent.errors import LinkClosedError, PeerProtocolError, StreamResetError
from asyncgrpo_agent.net.control import ROLLOUT
from asyncgrpo_agent.wire import framing
from asyncgrpo_agent.wire import messages as m
from asyncgrpo_agent.wire.deadlines import StreamDeadlines
from asyncgrpo_agent.wire.headers import OK_RESPONSE, Headers

Answer = Callable[[m.Rollout, bytes], Awaitable[tuple[m.RolloutAnswer, bytes]]]


@dataclass(slots=True, eq=False)
class UpstreamStream:
    """One rollout on its way to the server and back."""

    peer: str
    answer: Answer
    _sent: bytearray = field(default_factory=bytearray)
    _received: deque[bytes] = field(default_factory=deque)
    _asking: trio.CancelScope = field(default_factory=trio.CancelScope)
    _given_up: StreamResetError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._sent += data

    async def end(self) -> None:
        """The request is whole; it leaves when its answer is awaited."""

    async def response(self) -> Headers:
        deframer = framing.Deframer(ROLLOUT)
        deframer.feed(bytes(self._sent))
        envelope = deframer.next_message()
        if envelope is None:
            raise PeerProtocolError("a rollout without an envelope", where=self.peer)
        with self._asking:
            answer, content = await self.answer(envelope, deframer.take_rest())
        if self._given_up is not None:
            raise self._given_up
        self._received.extend(part for part in (framing.encode(answer), content) if part)
        return OK_RESPONSE

    def give_up(self, error: StreamResetError) -> None:
        self._given_up = error
        self._asking.cancel()

    async def receive(self) -> bytes:
        """The answer's envelope, then all of its body; b"" at the end."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return self._received.popleft() if self._received else b""


@dataclass(slots=True)
class UpstreamLink:
    """`url` as a link. Closing it ends `scope`, in which its agent works."""

    peer: str
    answer: Answer
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    rtt_s: float | None = None
    closed: bool = False

    async def open(
        self, headers: Headers, deadlines: StreamDeadlines | None = None
    ) -> UpstreamStream:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.closed:
            raise LinkClosedError("the proxy is stopping", where=self.peer)
        return UpstreamStream(self.peer, self.answer)

    async def aclose(self, reason: str) -> None:
        self.closed = True
        self.scope.cancel()


@dataclass(slots=True)
class UpstreamControl:
    """What the proxy tells its replicas."""

    obey: Callable[[m.FromAcceptor], None]

    async def send(self, message: m.FromAcceptor) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.obey(message)
