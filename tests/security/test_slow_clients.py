"""Slowloris at each HTTP/1.1 listener: many who never end a request, and one who is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from asyncgrpo_agent.config.sections import Telemetry
from asyncgrpo_agent.net.gateway import Gateway
from asyncgrpo_agent.net.http1 import Limits
from asyncgrpo_agent.roles import telemetry
from asyncgrpo_agent.roles.telemetry import Server
from fakes.backend import FakeBackend
from fakes.http_client import FakeClient

pytestmark = pytest.mark.slow

MANY = 300
PIECES = [
    b"",
    b"GET /heal",
    b"GET /health HTTP/1.1\r\nhost: h\r\n",
    b"POST /health HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n",
    b"POST /health HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1",
    b"GET /health HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n",
]
Run = Callable[[list[trio.SocketListener]], Awaitable[None]]


def gateway() -> Run:
    return Gateway(FakeBackend(), instance="t1", request_timeout_s=60.0).run


def telemetry_server() -> Run:
    return Server(Telemetry(), ()).run


@pytest.mark.parametrize("make", [gateway, telemetry_server])
async def test_slow_clients_keep_nobody_out(
    nursery: trio.Nursery, make: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Limits(header_s=0.5, body_s=0.5, idle_s=0.5)
    monkeypatch.setattr(telemetry, "LIMITS", short)
    monkeypatch.setattr("asyncgrpo_agent.net.http1.Limits", lambda: short)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    nursery.start_soon(make(), listeners)
    slow = []
    for number in range(MANY):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(PIECES[number % len(PIECES)])
        slow.append(stream)
    with trio.fail_after(5):
        good = FakeClient(await trio.open_tcp_stream("127.0.0.1", port))
        status, _, _ = await good.ask(method="GET", target="/health")
    assert status == 200
    with trio.fail_after(20):  # each is sent away at its deadline, whatever it still says
        for stream in slow:
            while await stream.receive_some():
                pass
            await stream.aclose()
    await good.stream.aclose()
