"""A site's HTTP proxy: CONNECT only, basic authorization, relays bytes, maybe over TLS.

As a process: `python -m fakes.connect_proxy HOST PORT USER:PASSWORD [CHAIN KEY]`.
"""

from __future__ import annotations

import base64
import ssl
import sys
from dataclasses import dataclass, field
from pathlib import Path

import trio

from asyncgrpo_agent.net.tls import server_context


@dataclass(slots=True)
class FakeConnectProxy:
    """Serves on a free loopback port; `targets` collects what it was asked to connect to."""

    authorization: str
    context: ssl.SSLContext | None = None
    forbidden: bool = False
    """Answers 403 to whom it knows."""
    silent: bool = False
    """Reads the request and says nothing."""
    targets: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(self.port, host=self.host)
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self.serve, [listener])
            task_status.started()

    async def serve(self, transport: trio.abc.Stream) -> None:
        near = transport
        if self.context is not None:
            near = trio.SSLStream(transport, self.context, server_side=True, https_compatible=True)
        try:
            async with near:
                await self._answer(near)
        except trio.BrokenResourceError:
            pass  # it does not like our certificate, or has gone

    async def _answer(self, near: trio.abc.Stream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = await near.receive_some(1)
            if not data:
                return
            head += data
        request, *fields = head.decode("ascii").split("\r\n")
        if f"Proxy-Authorization: {self.authorization}" not in fields:
            await near.send_all(b"HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n")
            return
        target = request.split(" ")[1]
        self.targets.append(target)
        if self.silent:
            await trio.sleep_forever()
        if self.forbidden:
            await near.send_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = target.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as far:
            await near.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with trio.open_nursery() as nursery:
                for source, sink in ((near, far), (far, near)):
                    nursery.start_soon(_relay, source, sink, nursery.cancel_scope)


async def _relay(source: trio.abc.Stream, sink: trio.abc.Stream, until: trio.CancelScope) -> None:
    try:
        async for data in source:
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    until.cancel()


def basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")


def main(host: str, port: str, pair: str, *tls: str) -> None:
    context = server_context(Path(tls[0]), Path(tls[1]), []) if tls else None
    trio.run(FakeConnectProxy(basic(pair), context, host=host, port=int(port)).run)


if __name__ == "__main__":
    main(*sys.argv[1:])
