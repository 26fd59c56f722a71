"""The names of TRL's metrics that the verdict, the alerts and the charts read.

TRL 1.16 logs `perf/...`, `sample/...`, `rollout/...` from its asynchronous trainer. Version 1.18
makes that trainer stable and renames some; what is read here is looked for under each name in turn,
so that a run of either shows the same.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

REWARD: Final = "reward"
RATIO: Final = "ratio"
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

NAMES_1_18: Final[Mapping[str, tuple[str, ...]]] = {
    RATIO: ("importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/mean"),
    STEP_S: ("step_time", "time/step_s"),
    FWD_BWD_S: ("time/fwd_bwd_s", "train/fwd_bwd_s"),
    WAIT_S: ("time/rollout_wait_s", "rollout_wait_time"),
    SYNC_S: ("time/weight_sync_s", "weight_sync_time"),
    QUEUE: ("rollouts/queue_size", "queue_size"),
    STALENESS: ("staleness/mean", "rollouts/staleness_mean"),
    DROPPED_STALE: ("staleness/dropped_total", "rollouts/dropped_stale_total"),
    SAMPLES: ("batch/samples", "samples_per_step"),
    IN_FLIGHT: ("rollouts/inflight", "inflight"),
    BACKPRESSURE_S: ("rollouts/backpressure_s", "backpressure_s"),
    TOKENS_PER_S: ("rollouts/generated_tok_s", "generated_tokens_per_second"),
}
"""Under which names the same is looked for besides."""


def value_of(values: Mapping[str, float], name: str) -> float | None:
    """A metric of one step by its name of 1.16, whichever version logged it."""
    if name in values:
        return values[name]
    for other in NAMES_1_18.get(name, ()):
        if other in values:
            return values[other]
    return None


def naming_of(names: Iterable[str]) -> str:
    """"1.18" if something was logged under a name that 1.16 does not have, else "1.16"."""
    newer = {other for others in NAMES_1_18.values() for other in others}
    return "1.18" if newer & set(names) else "1.16"
