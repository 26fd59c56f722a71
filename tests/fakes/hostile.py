"""Peers that attack a listener over real TLS, and the neighbour who must not notice.

An attack is bytes: `first` once, then `again(0)`, `again(1)`, ... for as long as the listener lets
it. What the listener makes of it is in its log.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import trio

from asyncgrpo_agent.errors import LinkError
from asyncgrpo_agent.net.link import Link
from asyncgrpo_agent.net.tls import SERVER_NAME, TlsStream, secure_client
from asyncgrpo_agent.wire.headers import OK_RESPONSE, Headers, post_request
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from asyncgrpo_agent.wire.messages import ALPN_FORWARD
from fakes.certificates import agent_context
from fakes.links import refuse
from fakes.loopback import dial_forward
from fakes.sessions import client_start, request
from fakes.wire_frames import HEADERS, split

_ECHO = post_request("/echo")
_LONGEST_STEP = post_request("/longest-step")
_KNOWN = post_request("/known")


def nothing(number: int) -> bytes:
    return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    reason: str
    """What the listener's log says when it ends the connection."""
    first: bytes = b""
    again: Callable[[int], bytes] = nothing
    """Sent for ever, `pause_s` apart; the first empty one is the last."""
    pause_s: float = 0.0
    reads: bool = True
    tls: bool = True
    known: bool = False
    """It has authenticated before; then its stream 1 is used up."""

    def __str__(self) -> str:
        return self.name


async def connect(address: str) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def shake_hands(address: str) -> TlsStream:
    transport = await connect(address)
    return await secure_client(transport, agent_context(ALPN_FORWARD), SERVER_NAME, ALPN_FORWARD)


async def introduce(stream: trio.abc.Stream) -> None:
    """Register, as far as the listener can tell: stream 1 is asked and answered."""
    await stream.send_all(client_start() + request(1, _KNOWN, end=True))
    await until_answered(stream, 1)


async def until_answered(stream: trio.abc.Stream, stream_id: int) -> list[tuple[int, int]]:
    """Read up to the answer's headers; gives the kinds of all frames and their streams."""
    received = b""
    while True:
        frames = [(kind, number) for kind, _, number, _ in split(received)]
        if (HEADERS, stream_id) in frames:
            return frames
        data = await stream.receive_some()
        assert data, "the listener closed the connection"
        received += data


async def attack(address: str, row: Attack, most_s: float) -> None:
    """Go on until the listener ends the connection. Raises TooSlowError if it does not."""
    stream = await shake_hands(address) if row.tls else await connect(address)
    async with stream:
        if row.known:
            await introduce(stream)
        with trio.fail_after(most_s):
            async with trio.open_nursery() as nursery:
                if row.reads:
                    nursery.start_soon(_read, stream, nursery.cancel_scope)
                await _write(stream, row)
                if not row.reads:
                    nursery.cancel_scope.cancel()


async def _write(stream: trio.abc.Stream, row: Attack) -> None:
    """Until the connection breaks, or there is nothing more to send."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(row.first)
        for number in count():
            await trio.sleep(row.pause_s)
            piece = row.again(number)
            if not piece:
                break
            await stream.send_all(piece)


async def _read(stream: trio.abc.Stream, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await stream.receive_some(16 << 10):
            pass
    scope.cancel()


@dataclass(slots=True)
class Crowd:
    """Many connections that send the same bytes and then hold on to what they have."""

    address: str
    first: bytes
    inside: int = 0
    refused: int = 0

    async def join(self, stay: trio.Nursery) -> None:
        try:
            stream = await shake_hands(self.address)
            await stream.send_all(self.first)
        except (LinkError, trio.BrokenResourceError):
            self.refused += 1
        else:
            self.inside += 1
            stay.start_soon(_hold, stream)


async def _hold(stream: TlsStream) -> None:
    try:
        await trio.sleep_forever()
    finally:
        await trio.aclose_forcefully(stream)


@dataclass(slots=True)
class Neighbour:
    """An agent that has registered and works on, one echo after the other."""

    link: Link
    rounds: int = 0
    _turned: trio.Event = field(default_factory=trio.Event)

    async def ask(self, request_headers: Headers, body: bytes) -> bytes:
        async with await self.link.open(request_headers) as stream:
            await stream.send(body)
            await stream.end()
            assert await stream.response() == OK_RESPONSE
            answer = b""
            while part := await stream.receive():
                answer += part
            return answer

    async def longest_step_s(self) -> float:
        """The longest that one task of the listener has kept the others waiting, in CPU time."""
        return float(await self.ask(_LONGEST_STEP, b""))

    async def another_round(self) -> None:
        await self._turned.wait()

    async def work(self) -> None:
        while True:
            body = b"round %d" % self.rounds * 200
            with trio.fail_after(5):
                assert await self.ask(_ECHO, body) == body
            self.rounds += 1
            self._turned.set()
            self._turned = trio.Event()
            await trio.sleep(0.005)


async def settle_next_door(nursery: trio.Nursery, address: str) -> Neighbour:
    link = await dial_forward(address)
    await nursery.start(link.run, refuse)
    neighbour = Neighbour(link)
    await neighbour.ask(_KNOWN, b"")
    link.authenticated(AUTHENTICATED, 10.0, 10.0)
    return neighbour
