"""The yardstick of `scripts/bench proxy`: a plain reverse proxy of aiohttp, HTTP/1.1 without TLS.

`proxy_baseline.py PORT...`, one port for each engine. It does what a routing proxy must: it parses
the body, hashes the prompt in chained blocks, picks the engine that was last given the longest
prefix, or the one with the least in flight, and passes the answer on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Mapping

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from closed_loop import read_command, reply

BLOCK_TOKENS = 16
MAX_BLOCKS = 200_000
HOP_BY_HOP = frozenset(
    ("connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade")
)


def block_hashes(tokens: list[int]) -> list[bytes]:
    parent, hashes = b"", []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes


class Router:
    """Holders by prefix."""

    def __init__(self, ports: list[int]) -> None:
        self.in_flight = dict.fromkeys(ports, 0)
        self._holders: dict[bytes, int] = {}

    def choose(self, hashes: list[bytes]) -> int:
        port = next((self._holders[one] for one in reversed(hashes) if one in self._holders), 0)
        port = port or min(self.in_flight, key=self.in_flight.__getitem__)
        for one in hashes[2:]:  # the first blocks are those of every prompt
            self._holders[one] = port
        while len(self._holders) > MAX_BLOCKS:
            del self._holders[next(iter(self._holders))]
        return port


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def application(router: Router, session: ClientSession) -> web.Application:
    async def complete(request: web.Request) -> web.Response:
        body = await request.read()
        port = router.choose(block_hashes(json.loads(body)["prompt"]))
        router.in_flight[port] += 1
        try:
            url = f"http://127.0.0.1:{port}{request.path}"
            headers = end_to_end(request.headers)
            async with session.post(url, data=body, headers=headers) as answer:
                content = await answer.read()
                return web.Response(
                    status=answer.status, body=content, headers=end_to_end(answer.headers)
                )
        finally:
            router.in_flight[port] -= 1

    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/v1/completions", complete)
    return app


async def serve(ports: list[int]) -> None:
    connector = TCPConnector(limit=0, keepalive_timeout=60)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=600)) as session:
        runner = web.AppRunner(application(Router(ports), session), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1.0, backlog=4096).start()
        reply({"port": runner.addresses[0][1], "pid": os.getpid()})
        await asyncio.to_thread(read_command)  # nothing is ever sent: returns when all is over
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve([int(port) for port in sys.argv[1:]]))
