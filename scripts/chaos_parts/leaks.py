"""What a fleet that has ended left behind, and what grew while it ran."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fleet_world import World
from observer import Observer
from reporter import logged

PATIENCE_S: Final = 15.0  # guards of killed agents give their group some seconds
LIVED_S: Final = 40.0  # an agent that lived less says nothing about growth
YOUNG_S: Final = 5.0  # a process that has just started has opened little
STAGED: Final = 12  # folders of adapters on one replica
SOCKETS: Final = 5  # of agents that were killed, and nobody was started a minute later


def found(world: World, observer: Observer) -> list[str]:
    """One sentence for each leak. All agents have ended."""
    return [
        *_processes(world),
        *_descriptors(observer.descriptors, most=2 * world.shape.rollouts),
        *_slots(world),
        *_disk(world),
    ]


def _processes(world: World) -> list[str]:
    deadline = time.monotonic() + PATIENCE_S
    while left := _living(world):
        if time.monotonic() > deadline:
            return [f"process on {host}: {line}" for host, line in left]
        time.sleep(0.1)
    return []


def _living(world: World) -> list[tuple[str, str]]:
    return [
        (name, " ".join(line)[:200])
        for name, host in world.hosts.items()
        for line in host.processes().values()
    ]


def _descriptors(samples: dict[int, list[tuple[float, int]]], most: int) -> list[str]:
    """An agent whose fewest open files of late are more than in its first third.

    `most` is what rollouts may account for: on each way one has a connection of its own, and how
    many a replica has changes with the others.
    """
    grown = []
    for pid, every in samples.items():
        rows = [row for row in every if row[0] - every[0][0] > YOUNG_S]
        if len(rows) < 9 or rows[-1][0] - rows[0][0] < LIVED_S:
            continue
        third = len(rows) // 3
        first, last = _fewest(rows[:third]), _fewest(rows[-third:])
        if last - first > most:
            grown.append(f"open files of process {pid}: {first}, later {last}")
    return grown


def _fewest(rows: Sequence[tuple[float, int]]) -> int:
    return min(count for _, count in rows)


def _slots(world: World) -> list[str]:
    """TRL has got all its answers, so no replica may think that it works on one."""
    left = []
    for name in world.replicas:
        for line in logged(world.agents[name].log):
            if line["event"] == "replica.draining" and line["in_flight"]:
                left += [f"rollouts on {name} that nobody waits for: {line['in_flight']}"]
    return left


def _disk(world: World) -> list[str]:
    left = [f"file {path.name} in the folder for temporary files" for path in _temporary(world)]
    sockets = list((world.folder / "run").iterdir())
    if len(sockets) > SOCKETS:
        left.append(f"{len(sockets)} folders for sockets")
    for name in world.replicas:
        staged = world.state_of(name) / "staged/demo"
        folders = list(staged.iterdir()) if staged.exists() else []
        if len(folders) > STAGED:
            left.append(f"{len(folders)} staged adapters on {name}")
    return left


def _temporary(world: World) -> list[Path]:
    return [path for path in (world.folder / "tmp").iterdir() if "fake-trl" not in path.name]
