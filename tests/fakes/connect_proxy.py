"""A site's HTTP proxy: CONNECT only, basic authorization, relays bytes.

As a process: `python -m fakes.connect_proxy HOST PORT USER:PASSWORD`.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass, field

import trio


@dataclass(slots=True)
class FakeConnectProxy:
    """Serves on a free loopback port; `targets` collects what it was asked to connect to."""

    authorization: str
    targets: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(self.port, host=self.host)
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    async def _serve(self, near: trio.SocketStream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await near.receive_some(1)
        request, *fields = head.decode("ascii").split("\r\n")
        if f"Proxy-Authorization: {self.authorization}" not in fields:
            await near.send_all(b"HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n")
            return
        target = request.split(" ")[1]
        self.targets.append(target)
        host, _, port = target.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as far:
            await near.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with trio.open_nursery() as nursery:
                for source, sink in ((near, far), (far, near)):
                    nursery.start_soon(_relay, source, sink, nursery.cancel_scope)


async def _relay(
    source: trio.SocketStream, sink: trio.SocketStream, until: trio.CancelScope
) -> None:
    try:
        async for data in source:
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    until.cancel()


def main(host: str, port: str, pair: str) -> None:
    authorization = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
    trio.run(FakeConnectProxy(authorization, host=host, port=int(port)).run)


if __name__ == "__main__":
    main(*sys.argv[1:])
