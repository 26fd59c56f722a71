"""What both pairs of the link benchmark share: payloads, the meter of one window, the command loop.

Standard library only, because the aiohttp pair may run in another Python.
"""

from __future__ import annotations

import json
import resource
import sys
import time

IN_FLIGHT = 128
REQUEST = b'{"prompt": "' + b"x" * 1_486 + b'"}'  # 1.5 KB
WARM_UP_S = 0.4


def cpu_s() -> float:
    """CPU time of this process so far, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rss_mb() -> float:
    """Memory that this process has resident now (not its peak)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


class Meter:
    """Counts what a closed loop gets done between `begin` and `finish`.

    Work is counted in body bytes rather than in finished requests: large answers that share one
    connection fairly finish in bursts, and a burst in or out of the window would be noise.
    """

    def __init__(self, response_bytes: int) -> None:
        self.done = False
        self._response_bytes = response_bytes
        self._bytes = 0
        self._latencies_s: list[float] = []

    def received(self, size_bytes: int) -> None:
        self._bytes += size_bytes

    def finished(self, began: float) -> None:
        self._latencies_s.append(time.perf_counter() - began)

    def begin(self, far_cpu_s: float) -> None:
        self._bytes = 0
        self._latencies_s.clear()
        self._start = (time.perf_counter(), cpu_s(), far_cpu_s)

    def finish(self, far_cpu_s: float) -> dict[str, float]:
        self.done = True
        now = (time.perf_counter(), cpu_s(), far_cpu_s)
        elapsed_s, near_s, far_s = (b - a for a, b in zip(self._start, now, strict=True))
        requests = self._bytes / self._response_bytes
        latencies_s = sorted(self._latencies_s) or [elapsed_s]
        return {
            "rps": requests / elapsed_s,
            "near_cpu_us": near_s / requests * 1e6,
            "far_cpu_us": far_s / requests * 1e6,
            "p50_ms": latencies_s[len(latencies_s) // 2] * 1e3,
            "p99_ms": latencies_s[len(latencies_s) * 99 // 100] * 1e3,
        }


def read_command() -> dict[str, float] | None:
    """The next command of the benchmark, None when it is gone. Blocks: call it in a thread."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def reply(answer: object) -> None:
    print(json.dumps(answer), flush=True)
