"""A whole fleet under a seeded schedule of faults, with an observer outside the agents.

First it runs undisturbed, which calibrates; then faults strike; then TRL is let go, and what the
fleet leaves behind is counted. The same seed gives the same faults at the same points.
"""

from __future__ import annotations

import argparse
import heapq
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import leaks
from faults import Faults
from fleet_world import PROXY, Shape, World, running
from observer import Observer
from plants import Plants
from reporter import WITHIN_S, Logs, Report
from schedule import KINDS, PARTS_OF_THE_WHOLE, Fault, plan

TICK_S: Final = 0.1
NOTICED_S: Final = 20.0  # the longest that a lasting fault may go unnoticed
SAMPLE_S: Final = 2.0
WARM_S: Final = 3.0
WANTED: Final = 0.7  # of the calibrated rate
END_S: Final = 90.0  # in which the run has to come to its end
ASK_AGAIN_S: Final = 0.3

Numbers = dict[str, Any]


def main() -> int:
    options = parse()
    faults = plan(
        seed=options.seed,
        seconds=60 * options.minutes,
        replicas=[f"r{number}" for number in range(1, options.replicas + 1)],
        every_s=options.every_s,
        kinds=options.kinds.split(",") if options.kinds else tuple(KINDS),
    )
    if options.replay:
        for fault in faults:
            print(f"{fault.at_s:8.2f} s  {fault.kind:18} {fault.host:8} for {fault.lasts_s:g} s")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with scratch(options) as folder:
        result = Chaos(options, faults, folder).run()
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["broken"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--replay", action="store_true", help="show the schedule, break nothing")
    parser.add_argument("--replicas", type=int, default=6, help="4 to 8 (%(default)s)")
    parser.add_argument(
        "--every-s", type=float, default=5.0, help="between faults, on average (%(default)s)"
    )
    parser.add_argument("--kinds", help="only these, separated by commas (all)")
    parser.add_argument(
        "--calibrate-s", type=float, default=15.0, help="undisturbed, before (%(default)s)"
    )
    parser.add_argument("--rollouts", type=int, default=32, help="in flight (%(default)s)")
    parser.add_argument("--keep-files", type=Path, metavar="DIR", help="leave logs and state there")
    options = parser.parse_args()
    unknown = set(options.kinds.split(",") if options.kinds else ()) - KINDS.keys()
    if unknown:
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}")
    return options


@contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    if options.keep_files is not None:
        folder = options.keep_files.resolve() / "fleet"  # a name that is in no command line of ours
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder).resolve()


@dataclass
class Chaos:
    options: argparse.Namespace
    faults: list[Fault]
    folder: Path
    reported: dict[int, float] = field(default_factory=dict)  # fault -> seconds until it was told
    overlaid: list[Fault] = field(default_factory=list)
    ended: bool = True
    _due: dict[int, float] = field(default_factory=dict)  # when it has to have been told
    _ends: dict[int, float] = field(default_factory=dict)
    _open: list[Fault] = field(default_factory=list)  # not told so far

    def run(self) -> Numbers:
        shape = Shape(replicas=self.options.replicas, rollouts=self.options.rollouts, batch=16)
        with running(self.folder, shape) as world:
            plants = Plants(world)
            self.hands = Faults(world, plants)
            self.report: Report = Logs(self.folder)
            self.observer = Observer(
                record=world.record,
                run_dir=world.folder / "s3/bucket/objects/demo",
                planted=plants.keys,
                loads={name: world.loads_of(name) for name in world.replicas},
            )
            self._sampled_at = 0.0
            began = self._calibrate(world)
            disturbed = time.time()
            self._disturb(world)
            ended = time.time()
            self._finish(world)
            left = leaks.found(world, self.observer) if self.ended else []
            return self._result(world, (began, disturbed, ended), left)

    # --- phases ------------------------------------------------------------------------------

    def _calibrate(self, world: World) -> float:
        world.start(world.trainer_host)
        self._until(world, lambda: bool(self.observer.steps), 60.0)
        self._for(world, WARM_S)
        began = time.time()
        self._for(world, self.options.calibrate_s)
        return began

    def _disturb(self, world: World) -> None:
        """All faults, each at its time; the end of one may have to wait."""
        began = time.monotonic()
        due: list[tuple[float, int, bool, Fault]] = []
        for fault in self.faults:
            heapq.heappush(due, (fault.at_s, fault.number, False, fault))
        seconds = 60 * self.options.minutes
        while due or time.monotonic() - began < seconds:
            self._tick(world)
            now = time.monotonic() - began
            while due and due[0][0] <= now:
                _, number, is_end, fault = heapq.heappop(due)
                if not is_end:
                    self._ends[number] = began + fault.ends_s
                    self._strike(fault)
                    heapq.heappush(due, (fault.ends_s, number, True, fault))
                elif not self.hands.end(fault):
                    heapq.heappush(due, (now + ASK_AGAIN_S, number, True, fault))

    def _strike(self, fault: Fault) -> None:
        print(f"{fault.at_s:8.2f} s  {fault.kind} {fault.host} {fault.lasts_s:g} s", flush=True)
        self.report.begin(fault)
        now = time.monotonic()
        if KINDS[fault.kind].place in PARTS_OF_THE_WHOLE:
            self._overlay(now)
        self._due[fault.number] = now + WITHIN_S
        self._open.append(fault)
        self.hands.begin(fault)

    def _overlay(self, now: float) -> None:
        """Who watched the other faults begins anew, and some will be over before he sees them."""
        for fault in list(self._open):
            if self._ends[fault.number] < now + NOTICED_S:
                self._open.remove(fault)
                self.overlaid.append(fault)
            self._due[fault.number] = now + WITHIN_S

    def _finish(self, world: World) -> None:
        """TRL ends, the trainer with 0, and the replicas with it."""
        self._for(world, 3.0)
        world.until.touch()
        trainer = world.agents[world.trainer_host]
        agents = [trainer, *(world.agents[name] for name in world.replicas)]
        deadline = time.monotonic() + END_S
        while any(agent.process.poll() is None for agent in agents):
            self._tick(world)
            if time.monotonic() > deadline:
                left = [agent.name for agent in agents if agent.process.poll() is None]
                self.observer.broken.append(f"did not come to an end: {left}")
                self.ended = False
                break
        for agent in agents:
            if agent.process.poll():
                said = f"{agent.name} ended with {agent.process.poll()}"
                self.observer.broken.append(said)
        while any(self._waits_for(fault) for fault in self._open):
            self._tick(world)
        self.observer.look()
        if world.agents[PROXY].process.poll() is None:
            world.agents[PROXY].end()

    def _waits_for(self, fault: Fault) -> bool:
        return time.monotonic() < self._due[fault.number]

    # --- the whole time ----------------------------------------------------------------------

    def _tick(self, world: World) -> None:
        time.sleep(TICK_S)
        world.look_after()
        self.observer.look()
        now = time.monotonic()
        for fault in list(self._open):
            if self.report.told(fault):
                self.reported[fault.number] = now - self._due[fault.number] + WITHIN_S
                self._open.remove(fault)
        if now - self._sampled_at > SAMPLE_S:
            self._sampled_at = now
            self.observer.sample(now, [agent.process.pid for agent in world.agents.values()])

    def _for(self, world: World, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._until(world, lambda: time.monotonic() >= until, seconds + 1)

    def _until(self, world: World, over: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not over():
            self._tick(world)
            if time.monotonic() > deadline:
                raise SystemExit(f"no step within {patience_s:g} s; see {self.folder}")

    # --- figures -----------------------------------------------------------------------------

    def _result(self, world: World, times: tuple[float, float, float], left: list[str]) -> Numbers:
        began, disturbed, ended = times
        seen = self.observer
        rate = sum(began <= t < disturbed for t in seen.rollouts) / (disturbed - began)
        under = sum(disturbed <= t < ended for t in seen.rollouts) / (ended - disturbed)
        steps_rate = sum(began <= t < disturbed for t in seen.steps.values()) / (disturbed - began)
        done = sum(disturbed <= t < ended for t in seen.steps.values())
        wanted = int(WANTED * steps_rate * 60 * self.options.minutes)
        failed = [line for line in seen.failed if not self._died(line[0])]
        late = {f.number: f"{f.kind} {f.host} at {f.at_s:g} s" for f in self._open}
        late |= {
            fault.number: f"{fault.kind} {fault.host} at {fault.at_s:g} s: {seconds:.0f} s"
            for fault in self.faults
            if (seconds := self.reported.get(fault.number, 0.0)) > WITHIN_S
        }
        exits = [f"{one.host}: {one.code} ({one.log.name})" for one in world.exits]
        broken = list(seen.broken)
        broken += [f"a rollout failed at {t:.1f}: {why}" for t, why in failed]
        broken += [f"leak: {one}" for one in left]
        broken += [f"unreported: {one}" for one in late.values()]
        broken += [f"{one.host} gave up, see {one.log}" for one in world.exits if one.code == 78]
        if done < wanted:
            broken.append(f"{done} steps were done, {wanted} wanted")
        return {
            "seed": self.options.seed,
            "minutes": self.options.minutes,
            "faults": len(self.faults),
            "faults_by_kind": dict(Counter(fault.kind for fault in self.faults)),
            "rollouts": len(seen.rollouts),
            "rollouts_failed": len(failed),
            "wrong_bytes": seen.wrong_bytes,
            "leaks": len(left),
            "steps_done": done,
            "steps_wanted": wanted,
            "unreported_faults": len(late),
            "overlaid_faults": len(self.overlaid),
            "throughput_ratio": round(under / rate, 3),
            "rollouts_per_s": round(rate, 1),
            "lives_of_trl": len(seen.lives),
            "exits": exits,
            "broken": broken,
        }

    def _died(self, at: float) -> bool:
        """Whether TRL was about to die then, by a fault: nobody is left to be failed."""
        return any(end <= at < end + 30.0 for end in self.hands.trl_ends)


if __name__ == "__main__":
    sys.exit(main())
