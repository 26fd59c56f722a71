"""The load of `scripts/bench proxy`: `proxy_load.py URL SHAPE`, the shape as JSON (see `Shape`).

A closed loop over raw keep-alive connections, with no work for a request but writing prepared
bytes. Prompts are token ids, eight requests to a prompt, as GRPO makes them. It prints one line
when the window begins and one with what was seen in it when all is answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from random import Random
from urllib.parse import urlsplit

GROUP = 8
PROMPT_TOKENS = (100, 1_000)
SHARED_TOKENS = 32  # the start of a chat template
VOCABULARY = 150_000
TEXTS = 200_000  # tokens that prompts are cut from
CONNECT_AT_ONCE = 50
LATE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much of what. Requests take from `least_s` to `most_s`, of the engine's time."""

    model: str
    in_flight: int
    seconds: float = 0.0  # of the window; 0: each connection makes one request
    warm_s: float = 0.0
    ramp_s: float = 0.0  # over which the connections begin
    least_s: float = 0.0
    most_s: float = 0.0
    max_tokens: int = 1_000
    seed: int = 0

    def json(self) -> str:
        return json.dumps(asdict(self))


class Requests:
    """An endless row of requests, each with the seconds that it takes."""

    def __init__(self, shape: Shape, host: str, path: str) -> None:
        self._shape = shape
        self._random = Random(shape.seed)
        self._head = (
            f"POST {path}/v1/completions HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n"
            "Accept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11 aiohttp/3.14\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._texts = [b"%d" % self._random.randrange(VOCABULARY) for _ in range(TEXTS)]
        self._shared = b",".join(self._texts[:SHARED_TOKENS])
        self._prompt = b""
        self.made = 0

    def next(self) -> tuple[bytes, float]:
        shape, random = self._shape, self._random
        if self.made % GROUP == 0:
            tokens = random.randint(*PROMPT_TOKENS) - SHARED_TOKENS
            start = random.randrange(TEXTS - tokens)
            self._prompt = self._shared + b"," + b",".join(self._texts[start : start + tokens])
        self.made += 1
        seconds = random.uniform(shape.least_s, shape.most_s)
        body = (
            b'{"model": "%s", "prompt": [%s], "max_tokens": %d, "temperature": 1.0, "top_p": 1.0, '
            b'"n": 1, "return_token_ids": true, "logprobs": 0, "seed": %d, "bench_s": %.4f}'
        ) % (shape.model.encode(), self._prompt, shape.max_tokens, self.made, seconds)
        return self._head + b"%d\r\n\r\n" % len(body) + body, seconds


@dataclass
class Tally:
    """What was seen in the window. `added_s`: latency over the engine's own time."""

    failed: int = 0
    failure: str = ""
    added_s: list[float] = field(default_factory=list)
    open: bool = False

    def note(self, status: int, added_s: float, words: bytes) -> None:
        if status != 200:
            self.failed += 1
            self.failure = self.failure or f"{status} {words[-300:].decode(errors='replace')}"
        elif self.open:
            self.added_s.append(added_s)

    def result(self, window_s: float) -> dict[str, float | int | str]:
        added_ms = sorted(1e3 * seconds for seconds in self.added_s) or [0.0]
        return {
            "requests": len(self.added_s),
            "rps": len(self.added_s) / window_s,
            "failed": self.failed,
            "failure": self.failure,
            "p50_ms": added_ms[len(added_ms) // 2],
            "p99_ms": added_ms[len(added_ms) * 99 // 100],
        }


class Connection(asyncio.Protocol):
    """One request at a time, until it is told to stop."""

    def __init__(self, requests: Requests, tally: Tally, *, once: bool) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.stop = once
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self._tally = tally
        self._received = bytearray()
        self._wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self) -> None:
        data, self._seconds = self._requests.next()
        self._began = self._loop.time()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._wanted:
            head_end = self._received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = bytes(self._received[:head_end]).lower()
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self._wanted = head_end + 4 + int(length)
        if len(self._received) >= self._wanted:
            self._answered()

    def _answered(self) -> None:
        status = int(self._received[9:12])
        added_s = self._loop.time() - self._began - self._seconds
        self._tally.note(status, added_s, bytes(self._received) if status != 200 else b"")
        self._received.clear()
        self._wanted = 0
        if self.stop:
            self.ended.set_result(None)
            self._transport.close()
        else:
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._tally.note(0, 0.0, f"the connection was lost: {exc}".encode())
            self.ended.set_result(None)


async def drive(url: str, shape: Shape) -> None:
    parts = urlsplit(url)
    requests = Requests(shape, parts.netloc, parts.path.rstrip("/"))
    tally = Tally(open=not shape.seconds)
    connections = await connect(parts.hostname or "", parts.port or 80, requests, tally, shape)
    began = await begin(connections, shape)
    if shape.seconds:
        await asyncio.sleep(shape.warm_s)
        tally.open = True
        began = asyncio.get_running_loop().time()
    say({"began": True})
    if shape.seconds:
        await asyncio.sleep(shape.seconds)
        tally.open = False
        say(tally.result(asyncio.get_running_loop().time() - began))
        for connection in connections:
            connection.stop = True
    await asyncio.gather(*(connection.ended for connection in connections))
    if not shape.seconds:
        say(tally.result(asyncio.get_running_loop().time() - began))
    say({"made": requests.made, "failed": tally.failed, "failure": tally.failure})


async def connect(
    host: str, port: int, requests: Requests, tally: Tally, shape: Shape
) -> list[Connection]:
    loop, opened = asyncio.get_running_loop(), []
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def one() -> None:
        async with gate:
            made = Connection(requests, tally, once=not shape.seconds)
            await loop.create_connection(lambda: made, host, port)
            opened.append(made)

    await asyncio.gather(*(one() for _ in range(shape.in_flight)))
    return opened


async def begin(connections: list[Connection], shape: Shape) -> float:
    """Spread over the ramp, so that what is measured is no queue of our own making."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number, connection in enumerate(connections):
        wait_s = began + shape.ramp_s * number / len(connections) - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        connection.send()
    return began


async def main(url: str, shape: Shape) -> None:
    """Whatever has no answer long after it is due ends the benchmark."""
    async with asyncio.timeout(shape.ramp_s + shape.warm_s + shape.seconds + shape.most_s + LATE_S):
        await drive(url, shape)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Shape(**json.loads(sys.argv[2]))))
