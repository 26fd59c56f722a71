"""What a whole asynchronous GRPO run gains from syncing without a pause, and what `quorum` does.

Whole agents with engines whose completions share them, and TRL's loop at the gateway: rollouts in
flight, a queue, a trainer that drops what is stale, and a sync after every step. Next to it the
reference way on the same engines: pause all, copy the adapter onto the mount, POST its path to each
server, again every 0.5 s while it says 'No adapter found', resume. The ways take turns. Once all
replicas are alike, once one takes seconds to load an adapter: then quorums differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from quorum_fleet import Fleet, load_takes, quiet, running, seen
from quorum_loop import Loop, Step
from quorum_shape import GROUP, Shape
from quorum_ways import Ours, Reference, Way
from sync import p50, p95
from sync_fleet import LOAD_S
from sync_mounts import KINDS, check
from sync_trl import Server

from asyncgrpo_agent.config.training import Trainer

QUORUMS = (0.0, 0.5, 1.0)
DEFAULT = f"{Trainer().quorum:g}"
WARM_STEPS = 1  # in which the pipeline fills
TIMES = {  # by mount: seconds of generating a batch, and of a window at least
    "hf-like": (4.0, 8.0)  # whose syncs take seconds
}
OTHERS = (1.5, 6.0)
PATIENCE_S = 120.0

Numbers = dict[str, Any]


def main() -> None:
    options = parse()
    check(options.mount)
    # As Ctrl-C, which trio knows: the fleet and its mounts end with the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    began, load = time.monotonic(), os.getloadavg()[0]
    with running(options.mount, shape_of(options), options.scratch) as fleet:
        result = measure(fleet, options)
    print_table(result)
    print(
        f"{options.rounds} rounds in {time.monotonic() - began:.0f} s; load {load:.1f} before and"
        f" {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench quorum", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument(
        "--mount", choices=KINDS, default="strict", help="as in scripts/bench sync (%(default)s)"
    )
    parser.add_argument("--cases", help="of alike and slow (both; hf-like: alike)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way (%(default)s)")
    parser.add_argument("--seconds", type=float, help="of a window, in whole steps (6; hf-like: 8)")
    parser.add_argument("--replicas", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="samples of a step (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=96, help="rollouts (%(default)s)")
    parser.add_argument(
        "--generate-s", type=float, help="in which the fleet makes a batch (1.5; hf-like: 4)"
    )
    parser.add_argument("--train-s", type=float, default=1.2, help="of a step (%(default)s)")
    parser.add_argument(
        "--slow-load-s", type=float, default=2.5, help="of the slow replica (%(default)s)"
    )
    parser.add_argument("--size-mb", type=int, default=4, help="of an adapter (%(default)s)")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="a disk with room for it all")
    options = parser.parse_args()
    if options.batch % GROUP:
        parser.error(f"--batch is in groups of {GROUP}")
    times = zip(("generate_s", "seconds"), TIMES.get(options.mount, OTHERS), strict=True)
    for name, seconds in times:
        if getattr(options, name) is None:
            setattr(options, name, seconds)
    options.cases = options.cases or ("alike" if options.mount == "hf-like" else "alike,slow")
    return options


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(
        replicas=options.replicas,
        batch=options.batch,
        in_flight=options.in_flight,
        generate_s=options.generate_s,
        train_s=options.train_s,
        size_mb=options.size_mb,
    )


# --- measuring -------------------------------------------------------------------------------


@dataclass
class Window:
    """Some whole steps of one run, and what the engines did meanwhile (sums of all of them)."""

    seconds: float
    steps: list[Step]
    failed: int  # completions of the whole run
    engines: dict[str, float]


def measure(fleet: Fleet, options: argparse.Namespace) -> Numbers:
    cases = {case: measure_case(fleet, options, case) for case in options.cases.split(",")}
    result = cases.pop("alike", {})
    return result | cases | {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs"}


def measure_case(fleet: Fleet, options: argparse.Namespace, case: str) -> Numbers:
    windows: dict[str, list[Window]] = {}
    for number in range(options.rounds):
        for quorum in QUORUMS:
            with fleet.trainer(quorum) as gateway:
                one = trio.run(run_ours, fleet, options, case, gateway)
            windows.setdefault(f"{quorum:g}", []).append(one)
        one = trio.run(run_reference, fleet, options, case, number)
        windows.setdefault("reference", []).append(one)
    rows = {
        name: numbers(found, options.batch, options.replicas) for name, found in windows.items()
    }
    reference = rows.pop("reference")
    ratio = rows[DEFAULT]["samples_per_s"] / reference["samples_per_s"]
    return {"ours": rows, "reference": reference, "ratio": round(ratio, 3)}


async def run_ours(fleet: Fleet, options: argparse.Namespace, case: str, gateway: str) -> Window:
    way = Ours(Server(gateway), fleet.site.folder / "trl", options.size_mb)
    return await one_run(way, fleet.engines(), options, case)


async def run_reference(
    fleet: Fleet, options: argparse.Namespace, case: str, number: int
) -> Window:
    engines = fleet.engines()
    way = Reference(fleet, engines, options.size_mb, f"{case}-{number}")
    window = await one_run(way, engines, options, case)
    await way.forget()
    return window


async def one_run(
    way: Way, engines: dict[str, Server], options: argparse.Namespace, case: str
) -> Window:
    """The whole steps of one run that a window holds, once its pipeline is full."""
    await load_takes(list(engines.values())[-1], options.slow_load_s if case == "slow" else LOAD_S)
    loop = Loop(way, shape_of(options))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            while len(loop.steps) < WARM_STEPS:
                await loop.step_done()
            first, before = len(loop.steps), await seen(engines)
            began = loop.steps[first - 1].ended_at
            while loop.steps[-1].ended_at < began + options.seconds:
                await loop.step_done()
            last, after = len(loop.steps), await seen(engines)
            nursery.cancel_scope.cancel()
    await quiet(engines)
    seconds = loop.steps[last - 1].ended_at - began
    grown = {name: after[name] - before[name] for name in after}
    return Window(seconds, loop.steps[first:last], loop.failed, grown)


# --- figures ---------------------------------------------------------------------------------


def numbers(windows: Sequence[Window], batch: int, replicas: int) -> Numbers:
    """Over all rounds. Shares are of the time, `discarded` is of the samples that came."""
    seconds = sum(window.seconds for window in windows)
    steps = [step for window in windows for step in window.steps]
    staleness = [versions for step in steps for versions in step.staleness]
    discarded, sync_s = sum(step.discarded for step in steps), [step.sync_s for step in steps]
    waited_s = sum(step.waited_s for step in steps)
    engines = {name: sum(w.engines[name] for w in windows) for name in windows[0].engines}
    return {
        "samples_per_s": round(len(steps) * batch / seconds, 2),
        "samples_per_s_rounds": [round(len(w.steps) * batch / w.seconds, 2) for w in windows],
        "steps_per_s": round(len(steps) / seconds, 3),
        "tokens_per_s": round(engines["tokens"] / engines["clock_s"] * replicas, 1),
        "sync_p50_s": p50(sync_s),
        "sync_p95_s": p95(sync_s),
        "paused_s": round(engines["paused_s"] / replicas, 2),
        "paused_share": round(engines["paused_s"] / engines["clock_s"], 3),
        "idle_share": round(engines["idle_s"] / engines["clock_s"], 3),
        "waited_s": round(waited_s, 2),
        "waited_share": round(waited_s / seconds, 3),
        "staleness_mean": round(statistics.mean(staleness), 2),
        "staleness_max": max(staleness),
        "discarded": round(discarded / (len(staleness) + discarded), 3),
        "failed_rollouts": sum(window.failed for window in windows),
        "seconds": round(seconds, 1),
    }


COLUMNS = {
    "samples/s": "samples_per_s",
    "steps/s": "steps_per_s",
    "tokens/s": "tokens_per_s",
    "sync p50": "sync_p50_s",
    "p95": "sync_p95_s",
    "paused": "paused_share",
    "no work": "idle_share",
    "waited": "waited_share",
    "stale": "staleness_mean",
    "most": "staleness_max",
    "dropped": "discarded",
    "failed": "failed_rollouts",
}


def print_table(result: Numbers) -> None:
    print("paused, no work: shares of the engines' time; waited: of the trainer's, for samples")
    for title, case in (("all replicas alike", result), ("one is slow", result.get("slow", {}))):
        if "ours" not in case:
            continue
        print(f"{title}: ours at the default quorum {DEFAULT} is {case['ratio']:.2f} x reference")
        print(" " * 11 + "".join(f"{column:>10}" for column in COLUMNS))
        named = {f"quorum {name}": row for name, row in case["ours"].items()}
        for name, row in {**named, "reference": case["reference"]}.items():
            print(f"{name:11}" + "".join(f"{row[key]:10.4g}" for key in COLUMNS.values()))


if __name__ == "__main__":
    main()
