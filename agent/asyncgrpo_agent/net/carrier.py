"""What the proxy needs of a way to a replica, whether it is a link or a server's URL.

`Link`, `LinkStream` and `ControlChannel` are the usual ones; `roles.upstream_link` has others.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from asyncgrpo_agent.errors import StreamResetError
from asyncgrpo_agent.wire.deadlines import StreamDeadlines
from asyncgrpo_agent.wire.headers import Headers
from asyncgrpo_agent.wire.messages import FromAcceptor


class Readable(Protocol):
    """Bytes of a peer."""

    @property
    def peer(self) -> str: ...
    async def receive(self) -> bytes | memoryview: ...


class Exchange(Readable, Protocol):
    """One request and its answer, as bytes. Leaving the context early gives it up."""

    async def send(self, data: bytes) -> None: ...
    async def end(self) -> None: ...
    async def response(self) -> Headers: ...
    def give_up(self, error: StreamResetError) -> None:
        """Reset it; whoever waits for the answer gets `error`."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Carrier(Protocol):
    """Opens exchanges with one replica. All of it raises LinkError when the way is gone."""

    peer: str

    @property
    def closed(self) -> bool: ...
    @property
    def rtt_s(self) -> float | None: ...
    async def open(self, headers: Headers, deadlines: StreamDeadlines = ...) -> Exchange: ...
    async def aclose(self, reason: str) -> None: ...


class Teller(Protocol):
    """Tells a replica something."""

    async def send(self, message: FromAcceptor) -> None: ...
