"""The names of TRL's metrics that the verdict, the alerts and the charts read.

They are those of TRL 1.16: `perf/...`, `sample/...`, `rollout/...`. Version 1.18 makes the trainer
stable and moves metrics to other groups; what is read here is then looked for by the part behind
the last slash, so that a run of either shows the same.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

REWARD: Final = "reward"
RATIO: Final = "ratio"
RATIO_OF: Final = "ratio/"  # and a class of replicas; see asyncgrpo_engine/ratios.py
STEP_S: Final = "perf/step_s"
FWD_BWD_S: Final = "perf/fwd_bwd_s"
WAIT_S: Final = "perf/rollout_wait_s"
SYNC_S: Final = "perf/weight_sync_s"
QUEUE: Final = "sample/rollout_queue_size"
STALENESS: Final = "sample/staleness_mean"
DROPPED_STALE: Final = "sample/dropped_stale_total"
SAMPLES: Final = "batch/samples_per_step"
IN_FLIGHT: Final = "rollout/inflight"
BACKPRESSURE_S: Final = "rollout/backpressure_s"
TOKENS_PER_S: Final = "rollout/generated_tok_s"
KL: Final = "kl"
ENTROPY: Final = "entropy"


def value_of(values: Mapping[str, float], name: str) -> float | None:
    """A metric of one step by its name of 1.16, whichever version logged it."""
    if name in values:
        return values[name]
    if "/" not in name:
        return None
    leaf = name.rpartition("/")[2]
    for other, value in values.items():
        if other.rpartition("/")[2] == leaf:
            return value
    return None


def ratios_by_class(values: Mapping[str, float]) -> dict[str, float]:
    """The importance ratio of each class of replicas, where rollouts came from several."""
    found = {
        name.removeprefix(RATIO_OF): value
        for name, value in values.items()
        if name.startswith(RATIO_OF)
    }
    return dict(sorted(found.items()))


def mean_ratios(steps: Collection[Mapping[str, float]]) -> dict[str, float]:
    """The mean over `steps` of the same; {} where no step has any."""
    seen: dict[str, list[float]] = {}
    for step in steps:
        for name, ratio in ratios_by_class(step).items():
            seen.setdefault(name, []).append(ratio)
    return {name: round(sum(all_) / len(all_), 5) for name, all_ in sorted(seen.items())}


def name_in(names: Collection[str], name: str) -> str | None:
    """The name that a metric of 1.16 has among `names`, as `value_of` finds it."""
    if name in names or "/" not in name:
        return name if name in names else None
    leaf = name.rpartition("/")[2]
    return next((other for other in names if other.rpartition("/")[2] == leaf), None)


def naming_of(trl_version: str) -> str:
    """Which of the two a version of TRL has; "1.16" where the version is not known."""
    release = [int(part) for part in trl_version.split(".")[:2] if part.isdigit()]
    return "1.18" if release >= [1, 18] else "1.16"
