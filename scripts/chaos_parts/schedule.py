"""Which faults strike when, and where. Pure: a seed gives the same faults at the same points.

A fault holds its host from its beginning until it has recovered; no host has two at a time. No more
than `most_out` replicas are out of service at once, and things that all hosts share (proxy, bucket,
trainer) break one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

Place = Literal["replica", "proxy", "trainer", "bucket"]
TRAINER_KILLS_APART_S: Final = 300.0
NEAR: Final = 0.5  # faults come after this share of the mean at least
PARTS_OF_THE_WHOLE: Final = ("proxy", "trainer", "bucket")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`lasts_s` is from beginning to end, `heals_s` what its host gets to be itself again."""

    place: Place
    weight: float
    lasts_s: tuple[float, float]
    heals_s: float
    is_out: bool = True
    """Whether a replica with it serves nothing."""
    ends_trl: bool = False
    """Whether TRL dies of it, and training goes back to a checkpoint."""


KINDS: Final[dict[str, Kind]] = {
    # Processes are killed and stopped.
    "kill-replica": Kind(place="replica", weight=8, lasts_s=(0.5, 4), heals_s=8),
    "kill-vllm": Kind(place="replica", weight=8, lasts_s=(0.1, 0.1), heals_s=10),
    "kill-mount-worker": Kind(
        place="replica", weight=4, lasts_s=(0.1, 0.1), heals_s=5, is_out=False
    ),
    "stop-replica": Kind(place="replica", weight=6, lasts_s=(22, 30), heals_s=12),
    "stop-vllm": Kind(place="replica", weight=6, lasts_s=(18, 25), heals_s=6),
    "stop-mount-worker": Kind(
        place="replica", weight=3, lasts_s=(14, 20), heals_s=15, is_out=False
    ),
    "kill-proxy": Kind(place="proxy", weight=4, lasts_s=(0.5, 3), heals_s=15),
    "stop-proxy": Kind(place="proxy", weight=2, lasts_s=(4, 8), heals_s=10),
    "stop-trainer": Kind(place="trainer", weight=2, lasts_s=(4, 8), heals_s=8),
    "stop-trl": Kind(place="trainer", weight=2, lasts_s=(3, 6), heals_s=4),
    "kill-trainer": Kind(place="trainer", weight=1, lasts_s=(0.5, 3), heals_s=20, ends_trl=True),
    "kill-trl": Kind(place="trainer", weight=1, lasts_s=(0.1, 0.1), heals_s=20, ends_trl=True),
    "move-trainer": Kind(place="trainer", weight=2, lasts_s=(3, 6), heals_s=20, ends_trl=True),
    # The network.
    "deaf-up": Kind(place="replica", weight=4, lasts_s=(25, 32), heals_s=12),
    "deaf-down": Kind(place="replica", weight=4, lasts_s=(25, 32), heals_s=12),
    "stalled-link": Kind(place="replica", weight=4, lasts_s=(25, 32), heals_s=12),
    "slow-link": Kind(place="replica", weight=4, lasts_s=(10, 20), heals_s=3, is_out=False),
    "reset-link": Kind(place="replica", weight=6, lasts_s=(0.1, 0.1), heals_s=9),
    "deaf-trainer": Kind(place="trainer", weight=1, lasts_s=(25, 30), heals_s=12),
    "reset-trainer": Kind(place="trainer", weight=2, lasts_s=(0.1, 0.1), heals_s=9),
    # Hosts come and go.
    "restart-proxy": Kind(place="proxy", weight=3, lasts_s=(1, 3), heals_s=15),
    "move-proxy": Kind(place="proxy", weight=2, lasts_s=(1, 3), heals_s=20),
    "leave": Kind(place="replica", weight=6, lasts_s=(5, 15), heals_s=8),
    "rotate-token": Kind(place="replica", weight=2, lasts_s=(5, 6), heals_s=8),
    "upgrade": Kind(place="replica", weight=3, lasts_s=(4, 5), heals_s=8),
    # The bucket.
    "bucket-outage": Kind(place="bucket", weight=2, lasts_s=(6, 12), heals_s=12),
    "mount-eio": Kind(place="replica", weight=5, lasts_s=(8, 15), heals_s=10, is_out=False),
    "mount-hung": Kind(place="replica", weight=4, lasts_s=(16, 22), heals_s=20, is_out=False),
    "mount-dead": Kind(place="replica", weight=4, lasts_s=(4, 10), heals_s=12, is_out=False),
    "corrupt-object": Kind(place="bucket", weight=2, lasts_s=(6, 10), heals_s=6),
    "forged-commit": Kind(place="bucket", weight=2, lasts_s=(6, 10), heals_s=6),
    # vLLM and the disk.
    "vllm-hangs": Kind(place="replica", weight=5, lasts_s=(20, 26), heals_s=6),
    "vllm-lies": Kind(place="replica", weight=4, lasts_s=(8, 14), heals_s=8),
    "vllm-forgets": Kind(place="replica", weight=4, lasts_s=(0.1, 0.1), heals_s=8),
    "disk-full": Kind(place="replica", weight=4, lasts_s=(8, 15), heals_s=10, is_out=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`at_s` counts from the beginning of the disturbed part of a run."""

    number: int
    at_s: float
    kind: str
    host: str
    lasts_s: float

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s


def plan(
    *,
    seed: int,
    seconds: float,
    replicas: Sequence[str],
    every_s: float = 5.0,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Fault]:
    """All faults, by time; each has ended when `seconds` are over. `kinds` are what may happen."""
    random, faults, at_s = Random(seed), list[Fault](), 0.0
    while True:
        at_s += random.uniform(NEAR * every_s, (2 - NEAR) * every_s)
        if at_s >= seconds:
            return faults
        fault = _draw(random, len(faults), at_s, faults, seconds, replicas, kinds)
        if fault is not None:
            faults.append(fault)


def _draw(
    random: Random,
    number: int,
    at_s: float,
    before: Sequence[Fault],
    seconds: float,
    replicas: Sequence[str],
    kinds: Sequence[str],
) -> Fault | None:
    """One that fits here, if any does."""
    held = [fault for fault in before if fault.ends_s + KINDS[fault.kind].heals_s > at_s]
    free = {
        name: [host for host in _hosts(KINDS[name], replicas) if host not in _held_hosts(held)]
        for name in kinds
        if _may(KINDS[name], held, before, at_s, replicas)
        and at_s + KINDS[name].lasts_s[1] < seconds
    }
    names = [name for name, hosts in free.items() if hosts]
    if not names:
        return None
    (name,) = random.choices(names, [KINDS[name].weight for name in names])
    return Fault(
        number=number,
        at_s=round(at_s, 2),
        kind=name,
        host=random.choice(free[name]),
        lasts_s=round(random.uniform(*KINDS[name].lasts_s), 2),
    )


def _hosts(kind: Kind, replicas: Sequence[str]) -> Sequence[str]:
    return replicas if kind.place == "replica" else (kind.place,)


def _held_hosts(held: Sequence[Fault]) -> set[str]:
    return {fault.host for fault in held}


def _may(
    kind: Kind, held: Sequence[Fault], before: Sequence[Fault], at_s: float, replicas: Sequence[str]
) -> bool:
    """Whether the rest of the fleet bears it now."""
    if kind.place in PARTS_OF_THE_WHOLE:
        if any(fault.host in PARTS_OF_THE_WHOLE for fault in held):
            return False
    elif kind.is_out and sum(KINDS[f.kind].is_out for f in held) >= len(replicas) // 2:
        return False
    if not kind.ends_trl:
        return True
    ends = [fault.at_s for fault in before if KINDS[fault.kind].ends_trl]
    return not ends or at_s - ends[-1] >= TRAINER_KILLS_APART_S
