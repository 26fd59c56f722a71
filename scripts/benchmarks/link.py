"""What the link costs, next to an aiohttp HTTP/1.1 pair that carries the same bodies.

Two processes a pair over loopback with TLS, 128 requests in flight in a closed loop. Rounds of
both pairs are interleaved and the median of each number is reported, so that a noisy machine
harms both alike: compare ratios and CPU a request, not rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncgrpo_agent.store.certificates import issue_server, make_ca

HERE = Path(__file__).resolve().parent
REPLY_S = 60.0
PAYLOADS = {"": 3_072, "_250kb": 250_000, "_2500kb": 2_500_000}  # bytes of the answer
NAMES = {
    "link": ("cpu_us_acceptor", "cpu_us_dialler"),
    "aiohttp": ("cpu_us_client", "cpu_us_server"),
}

Numbers = dict[str, float]


class End:
    """One process of a pair; it ends when its input is closed."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, **command: float) -> Numbers:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> Numbers:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], REPLY_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise SystemExit(f"no answer from {self._process.args}")
        answer: Numbers = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    options = parse()
    began, load = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-link-")))
        write_certificates(folder)
        acceptor, client = start_pairs(stack, folder, options.aiohttp_python)
        result = measure(acceptor, client, options.seconds, options.rounds)
    print_table(result)
    print(
        f"{options.rounds} rounds in {time.monotonic() - began:.0f} s; load {load:.1f} before and"
        f" {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs (the benchmark itself makes 2)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench link", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument(
        "--aiohttp-python",
        default=None,
        metavar="PYTHON",
        help="one that has aiohttp; by default this one, or that of the engine",
    )
    options = parser.parse_args()
    if options.aiohttp_python is None:
        has_aiohttp = importlib.util.find_spec("aiohttp") is not None
        options.aiohttp_python = sys.executable if has_aiohttp else ".engine/bin/python"
    return options


def write_certificates(folder: Path) -> None:
    now = datetime.now(UTC)
    ca, ca_key = make_ca("bench", now=now)
    chain, key = issue_server(ca, ca_key, ["127.0.0.1"], now=now)
    for name, pem in (("ca.pem", ca), ("chain.pem", chain), ("key.pem", key)):
        (folder / name).write_bytes(pem)


def start_pairs(stack: ExitStack, folder: Path, aiohttp_python: str) -> tuple[End, End]:
    """The two ends that make the load. What is started last ends first."""

    def start(python: str, script: str, *arguments: str) -> End:
        return stack.enter_context(End(python, script, *arguments))

    server = start(aiohttp_python, "aiohttp_ends.py", "server", str(folder))
    port = int(server.read()["port"])
    client = start(aiohttp_python, "aiohttp_ends.py", "client", str(folder), str(port))
    dialler = start(sys.executable, "link_ends.py", "dialler", str(folder))
    acceptor = start(sys.executable, "link_ends.py", "acceptor", str(folder))
    dialler.ask(port=acceptor.read()["port"])
    return acceptor, client


def measure(acceptor: End, client: End, seconds: float, rounds: int) -> dict[str, Numbers | float]:
    rss_mb = acceptor.ask(held_streams=2_000)["rss_mb"]  # first: later loads leave memory behind
    samples: dict[str, list[Numbers]] = {}
    crowding: list[float] = []
    for _ in range(rounds):
        for suffix, size_bytes in PAYLOADS.items():
            for name, end in (("link", acceptor), ("aiohttp", client)):
                numbers = end.ask(response_bytes=size_bytes, seconds=seconds)
                samples.setdefault(name + suffix, []).append(numbers)
        alone, crowded = (
            acceptor.ask(response_bytes=PAYLOADS[""], seconds=seconds, held_streams=held)
            for held in (1, 1_000)
        )
        crowding.append(cpu_us(crowded) / cpu_us(alone))
    return {
        **{name: medians(numbers, NAMES[name.split("_")[0]]) for name, numbers in samples.items()},
        "cost_1000_over_1_streams": round(statistics.median(crowding), 3),
        "rss_mb_2000_streams": round(rss_mb, 1),
    }


def cpu_us(numbers: Numbers) -> float:
    return numbers["near_cpu_us"] + numbers["far_cpu_us"]


def medians(samples: Sequence[Numbers], cpu_names: tuple[str, str]) -> Numbers:
    keys = ("rps", "near_cpu_us", "far_cpu_us", "p50_ms", "p99_ms")
    names = ("rps", *cpu_names, "p50_ms", "p99_ms")
    return {
        name: round(statistics.median(sample[key] for sample in samples), 2)
        for key, name in zip(keys, names, strict=True)
    }


def print_table(result: dict[str, Numbers | float]) -> None:
    """Rows in pairs; the ratios are of CPU a request, ours over aiohttp's, for each side."""
    print(
        f"{'':16}{'req/s':>10}{'CPU us':>10}{'far us':>10}{'p50 ms':>10}{'p99 ms':>10}  CPU ratio"
    )
    for suffix in PAYLOADS:
        ours, yardstick = ([*result[name + suffix].values()] for name in NAMES)  # type: ignore[union-attr]
        ratios = "{:.2f} {:.2f}".format(*(ours[i] / yardstick[i] for i in (1, 2)))
        for name, row, note in (("link", ours, ratios), ("aiohttp", yardstick, "")):
            print(f"{name + suffix:16}" + "".join(f"{n:10,.1f}" for n in row) + f"  {note}")
    print(f"CPU a request, 1,000 idle streams over 1: {result['cost_1000_over_1_streams']}")
    print(f"memory of the acceptor, 2,000 open streams: {result['rss_mb_2000_streams']} MB")


if __name__ == "__main__":
    main()
