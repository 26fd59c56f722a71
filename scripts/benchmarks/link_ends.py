"""Both ends of a link over loopback TLS: `link_ends.py acceptor|dialler FOLDER`.

The acceptor plays the proxy towards a replica: it listens, is the HTTP/2 client and makes the load.
The dialler plays the replica: it dials and serves. Paths are `/BYTES`, `/cpu` (the dialler's CPU
time so far) and `/hold` (answered when the request's body has ended).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import trio
from closed_loop import IN_FLIGHT, REQUEST, WARM_UP_S, Meter, cpu_s, read_command, reply, rss_mb

from asyncgrpo_agent.errors import LinkClosedError
from asyncgrpo_agent.net.accept import serve_links
from asyncgrpo_agent.net.dial import dial
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.tls import SERVER_NAME, client_context, server_context
from asyncgrpo_agent.wire.headers import OK_RESPONSE, Headers, path_of, post_request
from asyncgrpo_agent.wire.limits import AUTHENTICATED
from asyncgrpo_agent.wire.messages import ALPN_REVERSED

LIMITS = replace(AUTHENTICATED, max_streams=4096)  # for 2,000 streams, which no replica is given
PING_S = 10.0
CPU_REQUEST = post_request("/cpu")
HOLD_REQUEST = post_request("/hold")


# --- the acceptor ----------------------------------------------------------------------------


async def accept(folder: Path) -> None:
    context = server_context(folder / "chain.pem", folder / "key.pem", [ALPN_REVERSED])
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:

        async def drive(link: Link, alpn: str, peer: str) -> None:
            async with trio.open_nursery() as running:
                await running.start(link.run, refuse)
                link.authenticated(LIMITS, PING_S, PING_S)
                await obey(link)
                await link.aclose("measured")
            nursery.cancel_scope.cancel()

        await nursery.start(serve_links, listeners, context, drive)
        reply({"port": listeners[0].socket.getsockname()[1]})


async def refuse(stream: LinkStream) -> None:
    raise AssertionError("the dialler opens no streams")


async def obey(link: Link) -> None:
    """Carry out the benchmark's commands until it closes our input."""
    while (command := await trio.to_thread.run_sync(read_command)) is not None:
        async with trio.open_nursery() as holding:
            release = trio.Event()
            for _ in range(int(command.get("held_streams", 0))):
                await holding.start(hold, link, release)
            if "response_bytes" in command:
                answer = await measure(link, int(command["response_bytes"]), command["seconds"])
            else:
                await far_cpu_s(link)  # when this is answered, so much has reached the dialler
                answer = {"rss_mb": rss_mb()}
            release.set()
        reply(answer)


async def hold(link: Link, release: trio.Event, *, task_status: trio.TaskStatus[None]) -> None:
    """One stream whose request has been sent and whose answer is awaited."""
    async with await link.open(HOLD_REQUEST) as stream:
        await stream.send(REQUEST)
        task_status.started()
        await release.wait()
        await stream.end()
        while await stream.receive():
            pass


async def measure(link: Link, response_bytes: int, seconds: float) -> dict[str, float]:
    meter = Meter(response_bytes)
    request = post_request(f"/{response_bytes}")
    async with trio.open_nursery() as nursery:
        for _ in range(IN_FLIGHT):
            nursery.start_soon(repeat, link, request, meter)
        await trio.sleep(WARM_UP_S)
        meter.begin(await far_cpu_s(link))
        await trio.sleep(seconds)
        return meter.finish(await far_cpu_s(link))


async def repeat(link: Link, request: Headers, meter: Meter) -> None:
    while not meter.done:
        began = time.perf_counter()
        async with await link.open(request) as stream:
            await stream.send(REQUEST)
            await stream.end()
            await stream.response()
            while data := await stream.receive():
                meter.received(len(data))
        meter.finished(began)


async def far_cpu_s(link: Link) -> float:
    async with await link.open(CPU_REQUEST) as stream:
        await stream.end()
        return float(await stream.receive())


# --- the dialler -----------------------------------------------------------------------------


async def dial_and_serve(folder: Path) -> None:
    command = await trio.to_thread.run_sync(read_command)
    if command is None:
        return
    link = await dial(
        f"127.0.0.1:{int(command['port'])}",
        context=client_context((folder / "ca.pem").read_bytes(), ALPN_REVERSED),
        server_name=SERVER_NAME,
        alpn=ALPN_REVERSED,
        client=False,
        environ={},
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(link.run, answer)
            link.authenticated(LIMITS, PING_S, PING_S)
            reply({})
    except* LinkClosedError:
        pass  # the acceptor has said goodbye


async def answer(stream: LinkStream) -> None:
    async with stream:
        while await stream.receive():
            pass
        await stream.respond(OK_RESPONSE)
        await stream.send(body_for(path_of(stream.request_headers)))
        await stream.end()


def body_for(path: str, _bodies: dict[str, bytes] = {}) -> bytes:  # noqa: B006 - a cache
    if path == "/cpu":
        return str(cpu_s()).encode()
    if path not in _bodies:
        _bodies[path] = b"held" if path == "/hold" else bytes(int(path[1:]))
    return _bodies[path]


if __name__ == "__main__":
    ends = {"acceptor": accept, "dialler": dial_and_serve}
    trio.run(ends[sys.argv[1]], Path(sys.argv[2]))
