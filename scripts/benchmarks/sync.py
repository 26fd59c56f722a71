"""How long an adapter takes from TRL's load call until all replicas serve it, and what it costs.

Whole agents with engines that take 10 ms to load, and rollouts always in flight. In the same run
the reference way on the same engines and mounts: pause all, copy the adapter onto the mount, POST
its path to each server, again every 0.5 s while it says 'No adapter found', resume. Rounds of both
are interleaved. Tokens are those that the engines generate during a sync, over their rate before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from sync_fleet import Fleet, running
from sync_mounts import KINDS, check
from sync_trl import Server, Trl, write_adapter

from asyncgrpo_agent.core.adapter_log import AdapterTimes
from fakes.adapters import CONFIG, WEIGHTS

ROLLOUTS = 8  # in flight for each replica
BEFORE_S = 1.0  # in which the rate before a sync is measured
TICK_S = 0.005
PATIENCE_S = 600.0
RETRY_S = 0.5  # of the reference way
REFERENCE_SEED = 1_000_000  # its adapters are other ones

Numbers = dict[str, Any]


def main() -> None:
    options = parse()
    check(options.mount)
    began, load = time.monotonic(), os.getloadavg()[0]
    with running(options.mount, options.source, options.replicas, options.scratch) as fleet:
        result = trio.run(measure, fleet, options)
    print_table(result)
    print(
        f"{options.rounds} rounds in {time.monotonic() - began:.0f} s; load {load:.1f} before and"
        f" {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench sync", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--size-mb", type=int, default=4, help="of an adapter (%(default)s)")
    parser.add_argument(
        "--mount",
        choices=KINDS,
        default="strict",
        help="a plain folder, Mountpoint's rules, the same with objects visible 2.5 s after close"
        " and absence cached for 5 s, or SeaweedFS with rclone (%(default)s)",
    )
    parser.add_argument(
        "--source", choices=("bucket", "link"), default="bucket", help="of the replicas (bucket)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each way (%(default)s)")
    parser.add_argument("--no-reference", action="store_true", help="leave the reference way out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="a disk with room for it all")
    return parser.parse_args()


# --- measuring -------------------------------------------------------------------------------


@dataclass
class Way:
    """What was seen of one way to sync. The windows hold tokens and seconds."""

    seconds: list[float] = field(default_factory=list)
    before: list[tuple[float, float]] = field(default_factory=list)
    during: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Ours(Way):
    """Ours, with what the trainer's history says of each."""

    first_s: list[float] = field(default_factory=list)
    quorum_s: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=dict)


async def measure(fleet: Fleet, options: argparse.Namespace) -> Numbers:
    ours, reference = Ours(), Way()
    trl = Trl(fleet.gateway, fleet.folder / "trl", options.size_mb)
    await sync_ours(fleet, trl, Ours())  # the first one finds all asleep
    async with rolling_out(trl, ROLLOUTS * options.replicas):
        for number in range(options.rounds):
            await sync_ours(fleet, trl, ours)
            if not options.no_reference:
                await sync_reference(fleet, number, options.size_mb, reference)
        agent_rss_mb, worker_rss_mb = fleet.rss_mb()
    result = {"ours": our_numbers(ours)}
    if not options.no_reference:
        result["reference"] = numbers(reference)
    return result | {
        "agent_rss_mb": round(agent_rss_mb, 1),
        "mount_worker_rss_mb": round(worker_rss_mb, 1),
        "failed_rollouts": trl.failed_rollouts,
    }


@asynccontextmanager
async def rolling_out(trl: Trl, in_flight: int) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(trl.roll_out)
        await trio.sleep(BEFORE_S)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def counted(fleet: Fleet, way: Way) -> AsyncIterator[None]:
    """The block is a sync: tokens before and during it."""
    marks = [(await fleet.tokens(), time.perf_counter())]
    await trio.sleep(BEFORE_S)
    marks.append((await fleet.tokens(), time.perf_counter()))
    yield
    marks.append((await fleet.tokens(), time.perf_counter()))
    for window, (start, end) in zip((way.before, way.during), pairwise(marks), strict=True):
        window.append((end[0] - start[0], end[1] - start[1]))


async def sync_ours(fleet: Fleet, trl: Trl, way: Ours) -> None:
    await trl.save()
    async with counted(fleet, way):
        began_unix_s = time.time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(acked_by_all, fleet, trl.version + 1)
            began = time.perf_counter()
            await trl.load()
            way.quorum_s.append(time.perf_counter() - began)
    note(way, fleet.history.times(trl.version), began_unix_s)
    await trl.unload_oldest()


async def acked_by_all(fleet: Fleet, version: int) -> None:
    with trio.fail_after(PATIENCE_S):
        while True:
            acked = [one for one in fleet.history.times(version).replicas if one.ok]
            if len(acked) == len(fleet.engines):
                return
            await trio.sleep(TICK_S)


def note(way: Ours, times: AdapterTimes, began_unix_s: float) -> None:
    """The phases are those of the replica that was the last."""
    last = times.slowest()
    assert last is not None
    assert times.saved_unix_s is not None
    heard_s = times.saved_unix_s - began_unix_s
    found: dict[str, float | None] = {
        "uploaded": times.uploaded_s,
        "announced": times.announced_s,
        "visible": last.visible_s,
        "copied": last.copied_s,
        "verified": last.verified_s,
        "loaded": last.loaded_s,
        "acked": last.acked_s,
    }
    for phase, seconds in found.items():
        if seconds is not None:
            way.phases_s.setdefault(phase, []).append(heard_s + seconds)
    way.seconds.append(heard_s + (last.acked_s or 0.0))
    way.first_s.append(heard_s + min(one.acked_s or 0.0 for one in times.replicas if one.ok))


async def sync_reference(fleet: Fleet, number: int, size_mb: int, way: Way) -> None:
    local, key = fleet.folder / "reference", f"reference/v{number}"
    await trio.to_thread.run_sync(write_adapter, local, REFERENCE_SEED + number, size_mb)
    async with counted(fleet, way):
        began = time.perf_counter()
        await to_all(fleet.engines, "/pause?mode=keep")
        await trio.to_thread.run_sync(copy_adapter, local, fleet.mounts.trainer / key)
        async with trio.open_nursery() as nursery:
            for name, engine in fleet.engines.items():
                folder = str(fleet.mounts.replicas[name] / key)
                nursery.start_soon(load_patiently, engine, key, folder)
        await to_all(fleet.engines, "/resume")
        way.seconds.append(time.perf_counter() - began)
    await to_all(fleet.engines, "/v1/unload_lora_adapter", {"lora_name": key})
    await trio.to_thread.run_sync(shutil.rmtree, local)


async def to_all(engines: Mapping[str, Server], path: str, body: Any = None) -> None:
    async with trio.open_nursery() as nursery:
        for engine in engines.values():
            nursery.start_soon(engine.must, "POST", path, body)


def copy_adapter(local: Path, target: Path) -> None:
    """What servers look for first is written last."""
    target.mkdir(parents=True)
    for name in (WEIGHTS, CONFIG):
        shutil.copyfile(local / name, target / name)


async def load_patiently(engine: Server, name: str, folder: str) -> None:
    body = {"lora_name": name, "lora_path": folder}
    with trio.fail_after(PATIENCE_S):
        while True:
            status, content = await engine.call("POST", "/v1/load_lora_adapter", body)
            if status == 200:
                return
            if b"No adapter found" not in content:
                raise SystemExit(f"the reference way failed: {status} {content!r}")
            await trio.sleep(RETRY_S)


# --- figures ---------------------------------------------------------------------------------


def our_numbers(way: Ours) -> Numbers:
    return {
        "first_p50_s": p50(way.first_s),
        "quorum_p50_s": p50(way.quorum_s),
        **numbers(way),
        "phases": {
            name: {"p50_s": p50(seconds), "p95_s": p95(seconds)}
            for name, seconds in way.phases_s.items()
        },
    }


def numbers(way: Way) -> Numbers:
    ratio = rate(way.during) / rate(way.before)
    return {
        "p50_s": p50(way.seconds),
        "p95_s": p95(way.seconds),
        "tokens_during_over_before": round(ratio, 3),
    }


def rate(windows: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)


def p50(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def p95(values: Sequence[float]) -> float:
    return round(sorted(values)[math.ceil(0.95 * len(values)) - 1], 4)


def print_table(result: Mapping[str, Any]) -> None:
    ours = result["ours"]
    print(f"{'':12}{'p50 s':>9}{'p95 s':>9}{'tokens':>9}   tokens: rate during over before")
    for name in ("ours", "reference"):
        if row := result.get(name):
            tokens = row["tokens_during_over_before"]
            print(f"{name:12}{row['p50_s']:9.3f}{row['p95_s']:9.3f}{tokens:9.3f}")
    print(
        f"first replica {ours['first_p50_s']:.3f} s, load call {ours['quorum_p50_s']:.3f} s (p50)"
    )
    print("since the load call, of the last replica:")
    for name, row in ours["phases"].items():
        print(f"  {name:10}{row['p50_s']:9.3f}{row['p95_s']:9.3f}")
    print(
        f"memory of an agent, its worker included: {result['agent_rss_mb']:.0f} MB;"
        f" of the worker: {result['mount_worker_rss_mb']:.0f} MB;"
        f" failed rollouts: {result['failed_rollouts']}"
    )


if __name__ == "__main__":
    main()
