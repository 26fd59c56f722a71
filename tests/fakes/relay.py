"""A TCP relay whose network can fail: each direction may fall silent, be slow, or be reset.

A direction that is held passes nothing on, the end of the stream included, as a router that drops
packets does; what was held back comes through after `release`, as retransmissions would. It runs
in a thread of its own, so that tests which wait for processes need no event loop.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import trio

_RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of every connection of a relay."""

    delay_s: float = 0.0
    open: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.open.set()

    async def cross(self) -> None:
        await self.open.wait()
        await trio.sleep(self.delay_s)


class Relay:
    """Listens on a free loopback port; every connection is joined to `target`.

    `heard` is called with all that diallers send, piece by piece, in the relay's thread. Without a
    target it takes connections that the kernel redirects here, and goes on where they were bound;
    then `listen` says where that is.
    """

    def __init__(
        self,
        target: str,
        heard: Callable[[bytes], object] = len,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port)) if target else None
        self._listen = listen
        self._heard = heard
        self._up, self._down = Direction(), Direction()
        self._streams: set[trio.SocketStream] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=[self._main], daemon=True)
        self._token: trio.lowlevel.TrioToken
        self._stop: Callable[[], None]
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._stop)
        self._thread.join(10)

    # --- called by tests -----------------------------------------------------------------------

    def hold(self, *, up: bool = False, down: bool = False) -> None:
        """Silence what diallers send (`up`), what they should receive (`down`), or both."""
        self._call(lambda: self._hold(up=up, down=down))

    def release(self) -> None:
        self._call(lambda: [way.open.set() for way in (self._up, self._down)])

    def delay(self, seconds: float) -> None:
        """Every piece of data takes so long, each way."""
        self._call(lambda: self._delay(seconds))

    def reset(self) -> None:
        """Break every connection with RST, at both ends."""
        self._call(self._reset)

    # --- in the relay's thread -----------------------------------------------------------------

    def _call(self, act: Callable[[], object]) -> None:
        trio.from_thread.run_sync(act, trio_token=self._token)

    def _hold(self, *, up: bool, down: bool) -> None:
        for way, silent in ((self._up, up), (self._down, down)):
            if silent:
                way.open = trio.Event()

    def _delay(self, seconds: float) -> None:
        self._up.delay_s = self._down.delay_s = seconds

    def _reset(self) -> None:
        for stream in self._streams:
            _break(stream)

    async def _main(self) -> None:
        (listener,) = await trio.open_tcp_listeners(self._listen[1], host=self._listen[0])
        self.address = f"{self._listen[0]}:{listener.socket.getsockname()[1]}"
        async with trio.open_nursery() as nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._stop = nursery.cancel_scope.cancel
            self._started.set()
            await trio.serve_listeners(self._join, [listener])

    async def _join(self, near: trio.SocketStream) -> None:
        try:
            far = await trio.open_tcp_stream(*(self._target or _bound_for(near)))
        except OSError:
            return
        async with far:
            self._streams |= {near, far}
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_pump, near, far, self._up, self._heard)
                    nursery.start_soon(_pump, far, near, self._down, len)
            finally:
                self._streams -= {near, far}


async def _pump(
    source: trio.SocketStream,
    sink: trio.SocketStream,
    way: Direction,
    heard: Callable[[bytes], object],
) -> None:
    """Pass on bytes, their end, or the reset that came instead of it."""
    data: bytes | bytearray = b"-"
    while data:
        try:
            data = await source.receive_some(64 << 10)
            heard(data)
        except _BROKEN:
            await way.cross()
            _break(sink)
            return
        await way.cross()
        try:
            await (sink.send_all(data) if data else sink.send_eof())
        except _BROKEN:
            return  # the other direction passes on why, behind what came before


def _bound_for(stream: trio.SocketStream) -> tuple[str, int]:
    """Where the dialler wanted to go, before a redirection by nftables."""
    port, address = struct.unpack("!2xH4s8x", stream.socket.getsockopt(socket.SOL_IP, 80, 16))
    return socket.inet_ntoa(address), port


def _break(stream: trio.SocketStream) -> None:
    if stream.socket.fileno() >= 0:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        stream.socket.close()
