"""What routing costs and how well it places, next to a plain aiohttp reverse proxy.

Whole agents with fake engines: requests go through the gateway, the proxy, TLS links and replicas.
`saturate`: engines answer at once; CPU a request is that of the processes alone. `hold`: all
requests are in flight together; latency is what comes on top of the engine's time, and of what the
load itself and the engine add to it when nothing is between them (`direct`). `place`: shares
of the requests by where they went: to an engine that knows the prompt (affinity), to one that does
not though another does (spill), or the first of their prompt (unmatched). Imbalance is that of the
mean number in flight. The load is a process of its own. The machine's noise harms both proxies
alike, since their rounds are interleaved: compare CPU, not rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from link import End
from proxy_fleet import HERE, Fleet, cpu_s, rss_mb, running
from proxy_load import GROUP, Shape

ENGINE_S = (1.0, 10.0)  # of a request in `place`

Numbers = dict[str, Any]


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the fleet ends with the benchmark
    began, load = time.monotonic(), os.getloadavg()[0]
    result = measure_target(options) if options.target else measure(options)
    print_table(result)
    print(
        f"{time.monotonic() - began:.0f} s; load {load:.1f} before and {os.getloadavg()[0]:.1f}"
        f" after, on {os.cpu_count()} CPUs (the benchmark itself makes 2)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench proxy", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--phases", default="saturate,hold,place", help="(%(default)s)")
    parser.add_argument("--fleets", default="2,8", help="replicas in place (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of saturate (%(default)s)")
    parser.add_argument("--connections", type=int, default=64, help="of saturate (%(default)s)")
    parser.add_argument("--hold-requests", type=int, default=2_000, help="(%(default)s)")
    parser.add_argument("--hold-s", type=float, default=120.0, help="of each (%(default)s)")
    parser.add_argument("--place-requests", type=int, default=1_000, help="in flight (%(default)s)")
    parser.add_argument("--place-s", type=float, default=30.0, help="of a window (%(default)s)")
    parser.add_argument(
        "--target",
        metavar="URL",
        help="send the load there instead; its engines may be `proxy_engine.py --model NAME"
        " --bench-port PORT`, others take their own time",
    )
    parser.add_argument("--model", default="default", help="of --target (%(default)s)")
    parser.add_argument("--no-baseline", action="store_true", help="leave aiohttp's proxy out")
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


def measure(options: argparse.Namespace) -> Numbers:
    result: Numbers = {}
    phases, fleets = options.phases.split(","), [int(n) for n in options.fleets.split(",")]
    with running(fleets[0]) as fleet:
        if "saturate" in phases:
            result["saturate"] = saturate(fleet, options)
        if "hold" in phases:
            result["hold"] = hold(fleet, options)
        if "place" in phases:
            result["place"] = {}
            for replicas in fleets:
                fleet.grow(replicas)
                fleet.publish()
                result["place"][str(replicas)] = place(fleet, options)
    return result


def measure_target(options: argparse.Namespace) -> Numbers:
    """What can be seen of any proxy from the outside."""
    seen = {}
    for phase, shape in (
        ("saturate", saturating(options, options.model, 0)),
        ("hold", holding(options, options.model)),
        ("place", placing(options, options.model)),
    ):
        if phase in options.phases.split(","):
            numbers = drive(options.target, shape)
            seen[phase] = {name: numbers[name] for name in ("rps", "failed", "p50_ms", "p99_ms")}
    return seen


# --- the phases ------------------------------------------------------------------------------


def saturating(options: argparse.Namespace, model: str, number: int) -> Shape:
    return Shape(
        model=model,
        in_flight=options.connections,
        warm_s=1.0,
        seconds=options.seconds,
        seed=number,
    )


def holding(options: argparse.Namespace, model: str) -> Shape:
    return Shape(
        model=model,
        in_flight=options.hold_requests,
        ramp_s=min(options.hold_s / 3, 60.0),  # all are in flight together for the rest
        least_s=options.hold_s,
        most_s=options.hold_s,
        seed=1_000,
    )


def straight(options: argparse.Namespace, model: str) -> Shape:
    """Like `holding`, at the same rate, for as long as it takes to see what nobody adds."""
    seconds = min(options.hold_s, 5.0)
    ramp_s = min(options.hold_s / 3, 60.0)
    in_flight = max(10, int(options.hold_requests * seconds / ramp_s))
    return Shape(
        model=model,
        in_flight=min(in_flight, options.hold_requests),
        ramp_s=seconds,
        least_s=seconds,
        most_s=seconds,
        seed=3_000,
    )


def placing(options: argparse.Namespace, model: str, replicas: int = 0) -> Shape:
    return Shape(
        model=model,
        in_flight=options.place_requests,
        ramp_s=ENGINE_S[1] / 2,
        warm_s=ENGINE_S[1],
        seconds=options.place_s,
        least_s=ENGINE_S[0],
        most_s=ENGINE_S[1],
        seed=2_000 + replicas,  # prompts that no engine has seen
    )


def saturate(fleet: Fleet, options: argparse.Namespace) -> Numbers:
    agents = {
        "cpu_us_gateway": fleet.trainer.process.pid,
        "cpu_us_proxy": fleet.proxy.process.pid,
    }
    rounds: list[Numbers] = []
    with ExitStack() as stack:
        baseline = None if options.no_baseline else start_baseline(stack, fleet, options)
        for number in range(options.rounds):
            shape = saturating(options, fleet.model, number)
            row = measured(fleet.gateway, shape, agents)
            if baseline is not None:
                url, pid = baseline
                theirs = measured(url, shape, {"baseline_cpu_us": pid})
                row["baseline_rps"] = theirs["rps"]
                row["baseline_cpu_us"] = theirs["baseline_cpu_us"]
            rounds.append(row)
    names = ("rps", *agents, "baseline_rps", "baseline_cpu_us")
    return {
        name: round(statistics.median(row[name] for row in rounds), 1)
        for name in names
        if name in rounds[0]
    }


def start_baseline(stack: ExitStack, fleet: Fleet, options: argparse.Namespace) -> tuple[str, int]:
    """Its URL and its process."""
    ports = [str(port) for port in fleet.ports.values()]
    end = stack.enter_context(End(options.aiohttp_python, "proxy_baseline.py", *ports))
    made = end.read()
    return f"http://127.0.0.1:{int(made['port'])}", int(made["pid"])


def measured(url: str, shape: Shape, processes: dict[str, int]) -> Numbers:
    """The load's numbers, and the CPU time that processes took for a request."""
    marks: list[dict[str, float]] = []

    def mark() -> None:
        marks.append({name: cpu_s(pid) for name, pid in processes.items()})

    numbers = drive(url, shape, at_begin=mark, at_end=mark)
    if numbers["failed"]:
        raise SystemExit(f"{numbers['failed']} requests failed: {numbers['failure']}")
    spent_us = {name: 1e6 * (marks[1][name] - marks[0][name]) for name in processes}
    return {**numbers, **{name: us / numbers["requests"] for name, us in spent_us.items()}}


def hold(fleet: Fleet, options: argparse.Namespace) -> Numbers:
    rss: list[float] = []
    numbers = drive(
        fleet.gateway,
        holding(options, fleet.model),
        at_begin=lambda: rss.append(rss_mb(fleet.proxy.process.pid)),
    )
    direct = drive(next(iter(fleet.engine_urls())), straight(options, fleet.model))
    return {
        "failed": numbers["failed"],
        "added_p50_ms": round(numbers["p50_ms"] - direct["p50_ms"], 2),
        "added_p99_ms": round(numbers["p99_ms"] - direct["p50_ms"], 2),
        "direct_p50_ms": round(direct["p50_ms"], 2),
        "rss_mb": round(rss[0], 1),
    }


def place(fleet: Fleet, options: argparse.Namespace) -> Numbers:
    marks = [fleet.counters()]

    def mark() -> None:
        marks.append(fleet.counters())

    shape = placing(options, fleet.model, len(fleet.ports))
    numbers = drive(fleet.gateway, shape, at_begin=mark, at_end=mark)
    if numbers["failed"]:
        raise SystemExit(f"{numbers['failed']} requests failed: {numbers['failure']}")
    mark()
    first, begin, end, last = marks
    requests, hits = (sum(grown(first, last, name)) for name in ("requests", "hits"))
    prompts = -(-numbers["made"] // GROUP)
    means = [
        busy_s / seconds
        for busy_s, seconds in zip(
            grown(begin, end, "running_s"), grown(begin, end, "at"), strict=True
        )
    ]
    return {
        "affinity": round(hits / requests, 4),
        "spill": round((requests - hits - prompts) / requests, 4),
        "unmatched": round(prompts / requests, 4),
        "imbalance": round(max(means) / statistics.mean(means) - 1, 4),
    }


def grown(before: list[dict[str, float]], after: list[dict[str, float]], name: str) -> list[float]:
    """By how much the counter of each engine did."""
    return [b[name] - a[name] for a, b in zip(before, after, strict=True)]


# --- the load --------------------------------------------------------------------------------


def nothing() -> None:
    pass


def drive(
    url: str,
    shape: Shape,
    *,
    at_begin: Callable[[], None] = nothing,
    at_end: Callable[[], None] = nothing,
) -> Numbers:
    """Have another process make the load; the hooks are called at both ends of its window."""
    command = [sys.executable, str(HERE / "proxy_load.py"), url, shape.json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            read(process.stdout.readline())
            at_begin()
            numbers = read(process.stdout.readline())
            at_end()
            return {**numbers, **read(process.stdout.readline())}
        except BaseException:
            process.kill()
            raise


def read(line: bytes) -> Numbers:
    if not line:
        raise SystemExit("the load ended early")
    numbers: Numbers = json.loads(line)
    return numbers


def print_table(result: Numbers) -> None:
    for phase, numbers in result.items():
        rows = numbers.items() if phase == "place" and "rps" not in numbers else [("", numbers)]
        for name, row in rows:
            shown = "  ".join(f"{key} {value:,.4g}" for key, value in row.items())
            print(f"{phase:9}{name:>2}  {shown}")


if __name__ == "__main__":
    main()
