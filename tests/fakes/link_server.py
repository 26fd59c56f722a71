"""The real listener in a process of its own, so that its memory and CPU can be measured.

`python -m fakes.link_server CHAIN KEY` listens on loopback and prints its port. GET /health says
ok, GET /large sends 5 MB, /stall takes nothing and says nothing, POST /known makes the connection
one that has authenticated, /longest-step tells the most CPU time that any task took between two
checkpoints, and any other request is echoed. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from functools import partial
from pathlib import Path

import trio
import trio.testing

from asyncgrpo_agent.logs import LineFormatter
from asyncgrpo_agent.net.accept import (
    MAX_STRANGERS,
    MAX_STRANGERS_OF_ADDRESS,
    PROTOCOLS,
    serve_links,
)
from asyncgrpo_agent.net.link import Link, LinkStream
from asyncgrpo_agent.net.tls import server_context
from asyncgrpo_agent.wire.headers import OK_RESPONSE, path_of
from asyncgrpo_agent.wire.limits import AUTHENTICATED

LARGE = bytes(range(250)) * 20_000


class StepMeter(trio.abc.Instrument):
    """Measures what tasks do between two checkpoints, however busy the machine is."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began)


METER = StepMeter()


async def respond(stream: LinkStream, body: bytes) -> None:
    async with stream:
        await stream.respond(OK_RESPONSE)
        await stream.send(body)
        await stream.end()


async def echo(stream: LinkStream) -> None:
    async with stream:
        await stream.respond(OK_RESPONSE)
        while data := await stream.receive():
            await stream.send(data)
        await stream.end()


async def serve_stream(link: Link, stream: LinkStream) -> None:
    match path_of(stream.request_headers):
        case "/health":
            await respond(stream, b"ok\n")
        case "/large":
            await respond(stream, LARGE)
        case "/stall":
            await trio.sleep_forever()
        case "/longest-step":
            await respond(stream, b"%.6f" % METER.longest_s)
        case "/known":
            link.authenticated(AUTHENTICATED, 10.0, 10.0)
            await respond(stream, b"")
        case _:
            await echo(stream)


async def serve_link(known: bool, link: Link, alpn: str, peer: str) -> None:
    if known:
        link.authenticated(AUTHENTICATED, 10.0, 10.0)
    await link.run(partial(serve_stream, link))


async def main(words: argparse.Namespace) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=512)
    serve = partial(
        serve_links,
        strangers_of_address=words.strangers,
        strangers_in_all=MAX_STRANGERS,
    )
    async with trio.open_nursery() as nursery:
        context = server_context(words.chain, words.key, PROTOCOLS)
        await nursery.start(serve, listeners, context, partial(serve_link, words.known))
        sys.stdout.write(f"{listeners[0].socket.getsockname()[1]}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("chain", type=Path)
    parser.add_argument("key", type=Path)
    parser.add_argument("--known", action="store_true", help="nobody is a stranger")
    parser.add_argument("--strangers", type=int, default=MAX_STRANGERS_OF_ADDRESS)
    parser.add_argument("--speed", type=float, default=1.0, help="of its clock")
    words = parser.parse_args(argv)
    logs = logging.StreamHandler()
    logs.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[logs])
    clock = None if words.speed == 1.0 else trio.testing.MockClock(rate=words.speed)
    trio.run(main, words, clock=clock, instruments=[METER])


if __name__ == "__main__":
    run(sys.argv[1:])
