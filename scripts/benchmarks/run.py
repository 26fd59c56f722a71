"""What a whole run with real TRL gains from syncing without a pause, and what our path costs TRL.

TRL's AsyncGRPOTrainer trains a tiny model on the CPU and syncs after every step. Two replicas
generate by the clock, so that the machine's cores are not what is measured. `ours`: through
gateway, proxy and links. `reference`: the same job and engines; at every sync all are paused, the
adapter is copied onto the mount and its path posted to each until it is found, as published recipes
do it.

The run in miniature is one of the published sanity recipe: 128 answers a step of up to 3,000
tokens, about 1,000 in the mean, are some 128,000 tokens; two replicas at 10,000 tokens a second
each make them in about 6 s (`--generate-s`). So a step takes as long here, with 32 answers of 32 to
96 tokens. Twice a batch is in flight, for four times, TRL's default, would make answers of
this spread too old. The mount (`hf-like`) shows a file 2.5 s after it was closed and remembers for
5 s that it was not there. Pauses of 6 to 30 s a sync are what published runs tell of.

The ratio follows from these times. The reference adds its whole sync to each step; ours is hidden
behind generation as long as training and sync take less than generating a batch. So it is about
(G + R) / max(G, T + S), with R and S for the two syncs, T for training; the table prints them all.

`direct`: one engine of a fixed rate for each completion and no sync. Rollouts a second of TRL at
the engine's own port, and of TRL through gateway, proxy and link to the same engine, from tokens
over a window while all slots are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio
from quorum_shape import GROUP, Pace
from run_fleet import Fleet, Training, running, seen
from run_reference import Reference
from run_trl import MEAN_TOKENS, Step, p50, training
from sync_mounts import KINDS, check
from sync_trl import Server

WARM_STEPS = 3  # in which the pipeline fills
PATIENCE_S = 600.0
TICK_S = 0.05
NEVER = 1_000_000  # steps between syncs

Numbers = dict[str, Any]


def main() -> None:
    options = parse()
    check(options.mount)
    # As Ctrl-C, which trio knows: the fleet and its mounts end with the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    began, load = time.monotonic(), os.getloadavg()[0]
    result: Numbers = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs"}
    parts = options.parts.split(",")
    if "sync" in parts:
        result |= measure_syncs(options)
        print_syncs(result, options)
    if "direct" in parts:
        result["direct"] = measure_direct(options)
        print_direct(result["direct"])
    print(
        f"{time.monotonic() - began:.0f} s; load {load:.1f} before and"
        f" {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument(
        "--mount", choices=KINDS, default="hf-like", help="as in scripts/bench sync (%(default)s)"
    )
    parser.add_argument("--parts", default="sync,direct", help="what to measure (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of each way (%(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=64, help="rollouts (%(default)s)")
    parser.add_argument(
        "--generate-s",
        type=float,
        default=6.0,
        help="in which the fleet makes a batch (%(default)s)",
    )
    parser.add_argument(
        "--rollout-s", type=float, default=4.0, help="of a mean rollout of `direct` (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of each window of `direct` (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of `direct` (%(default)s)")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="a disk with room for it all")
    options = parser.parse_args()
    if options.batch % GROUP:
        parser.error(f"--batch is in groups of {GROUP}")
    return options


# --- syncs -----------------------------------------------------------------------------------


def measure_syncs(options: argparse.Namespace) -> Numbers:
    pace = Pace(
        replicas=options.replicas,
        batch=options.batch,
        in_flight=options.in_flight,
        generate_s=options.generate_s,
        mean_tokens=MEAN_TOKENS,
    )
    wanted = WARM_STEPS + options.steps
    with running(options.mount, pace, options.scratch) as fleet:
        shape = {"batch": options.batch, "in_flight": options.in_flight, "sync_steps": 1}
        with fleet.training(**shape) as trl:
            ours = trl.wait_for_steps(wanted, PATIENCE_S)
        if failed := trl.rollouts_failed():
            raise SystemExit(f"{failed} rollouts failed")
        reference = trio.run(run_reference, fleet, trl.job, wanted)
    rows = {
        "ours": numbers(ours[:wanted], options.batch),
        "reference": numbers(reference[:wanted], options.batch),
    }
    ratio = rows["ours"]["samples_per_s"] / rows["reference"]["samples_per_s"]
    return {**rows, "ratio": round(ratio, 3), "generate_s": options.generate_s}


async def run_reference(fleet: Fleet, job: Path, wanted: int) -> list[Step]:
    server = Reference(fleet.engines(), fleet.mounts)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(server.run)
        folder = fleet.site.folder / "reference-trl"
        with training(job, folder, url) as process, trio.fail_after(PATIENCE_S):
            while len(server.steps) < wanted:
                must_run(process, folder)
                await trio.sleep(TICK_S)
            nursery.cancel_scope.cancel()
    return server.steps


def numbers(steps: Sequence[Step], batch: int) -> Numbers:
    """Of all steps but those in which the pipeline filled."""
    measured = steps[WARM_STEPS:]
    seconds = measured[-1].at_s - steps[WARM_STEPS - 1].at_s
    between = [after.at_s - before.at_s for before, after in pairwise(steps[WARM_STEPS - 1 :])]
    return {
        "samples_per_s": round(len(measured) * batch / seconds, 3),
        "step_p50_s": round(statistics.median(between), 3),
        "sync_p50_s": p50(measured, "perf/weight_sync_s"),
        "train_p50_s": p50(measured, "perf/fwd_bwd_s"),
        "waited_p50_s": p50(measured, "perf/rollout_wait_s"),
        "staleness_mean": p50(measured, "sample/staleness_mean"),
        "dropped": sum(one.values.get("sample/dropped_stale_total", 0.0) for one in measured),
        "steps": len(measured),
    }


def print_syncs(result: Numbers, options: argparse.Namespace) -> None:
    names = [name for name in result["ours"] if name != "steps"]
    print(" " * 10 + "".join(f"{name:>16}" for name in names))
    for way in ("ours", "reference"):
        print(f"{way:10}" + "".join(f"{result[way][name]:16.4g}" for name in names))
    ours, reference = result["ours"], result["reference"]
    generate_s = options.generate_s
    expected = (generate_s + reference["sync_p50_s"]) / max(
        generate_s, ours["train_p50_s"] + ours["sync_p50_s"]
    )
    print(
        f"ratio {result['ratio']:.2f}; a batch takes {generate_s:g} s to generate, from which"
        f" {expected:.2f} follow: 1 + the reference's sync over it, unless training and sync"
        " take longer"
    )


# --- TRL with and without our path ------------------------------------------------------------


def measure_direct(options: argparse.Namespace) -> Numbers:
    pace = Pace(
        replicas=1,
        batch=options.batch,
        in_flight=options.in_flight,
        generate_s=options.rollout_s * options.batch / options.in_flight,
        mean_tokens=MEAN_TOKENS,
    )
    direct, through = [], []
    with running("dir", pace, options.scratch, shared=False) as fleet:
        shape = {"batch": options.batch, "in_flight": options.in_flight, "sync_steps": NEVER}
        for number in range(options.rounds):
            with fleet.training(**shape) as trl:
                through.append(trio.run(rate, fleet, options, trl))
            direct.append(trio.run(rate_direct, fleet, options, trl.job, number))
    rates = {"rollouts_per_s": statistics.mean(direct), "through": statistics.mean(through)}
    ratio = rates["through"] / rates["rollouts_per_s"]
    return {**{k: round(v, 3) for k, v in rates.items()}, "ratio": round(ratio, 4)}


async def rate_direct(fleet: Fleet, options: argparse.Namespace, job: Path, number: int) -> float:
    (engine,) = fleet.engines().values()
    url = f"http://127.0.0.1:{(await seen(engine))['port']:.0f}"
    folder = fleet.site.folder / f"direct-trl-{number}"
    with training(job, folder, url) as process:
        return await window(engine, options, lambda: must_run(process, folder))


async def rate(fleet: Fleet, options: argparse.Namespace, trl: Training) -> float:
    (engine,) = fleet.engines().values()
    return await window(engine, options, lambda: must_run(trl.agent.process, trl.folder))


async def window(engine: Server, options: argparse.Namespace, look: Any) -> float:
    """Rollouts a second once all slots are taken and the rollouts' ends have spread."""
    with trio.fail_after(PATIENCE_S):
        while (await seen(engine))["running"] < options.in_flight:
            look()
            await trio.sleep(TICK_S)
    await trio.sleep(2 * options.rollout_s)
    before = await seen(engine)
    await trio.sleep(options.seconds)
    after = await seen(engine)
    look()
    seconds = after["clock_s"] - before["clock_s"]
    return (after["tokens"] - before["tokens"]) / seconds / MEAN_TOKENS


def must_run(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is not None:
        log = (folder / "train.log").read_text()
        raise SystemExit(f"TRL ended with {process.returncode}:\n{log[-4000:]}")


def print_direct(found: Numbers) -> None:
    print(
        f"rollouts a second: TRL directly {found['rollouts_per_s']:.2f}, through gateway, proxy and"
        f" link {found['through']:.2f}: {found['ratio']:.3f} of it"
    )


if __name__ == "__main__":
    main()
