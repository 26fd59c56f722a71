"""Which GPUs of a host each of its engines gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def gpu_groups(
    gpus: Sequence[str], replicas: Literal["auto"] | int, gpus_per_engine: int
) -> list[str]:
    """One entry for each engine: its GPUs as "0,1", or "" where nothing is to be said of them.

    `gpus` are those of this host that may be used, none where there is no GPU. One engine gets all
    of them. Raises ValueError, in words for the user, when the engines cannot have equal shares.
    """
    if not gpus:
        return [""] * (1 if replicas == "auto" else replicas)
    if replicas == 1:
        return [",".join(gpus)]
    if replicas == "auto":
        if len(gpus) % gpus_per_engine:
            raise ValueError(
                f"{_gpus(len(gpus))} cannot be shared out among engines of {gpus_per_engine} each"
            )
        replicas = len(gpus) // gpus_per_engine
    needed = replicas * gpus_per_engine
    if len(gpus) < needed:
        raise ValueError(f"{replicas} engines need {_gpus(needed)}, there are {len(gpus)}")
    starts = range(0, needed, gpus_per_engine)
    return [",".join(gpus[start : start + gpus_per_engine]) for start in starts]


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
