"""What a run was made with: versions, devices, ways and seeds; printed, and kept in its history."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from asyncgrpo_engine import lifetime
from asyncgrpo_engine.events import Events, is_first_rank

_PACKAGES: Final = ("trl", "transformers", "peft", "torch", "accelerate", "datasets")
_SEED: Final = "ASYNCGRPO_ROLLOUT_SEED"


def versions() -> dict[str, str]:
    """Of the packages that decide how training goes; those that are missing are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def seed_rollouts(seed: int, first_step: int) -> str:
    """Make the sampling seeds of TRL's rollout process follow from the run's own seed.

    Each start draws others, for it must not repeat the answers of the steps before it.
    """
    os.environ[_SEED] = f"{seed}-{first_step}"
    return os.environ[_SEED]


def begin_rollouts() -> None:
    """First of all in TRL's rollout process, whichever program has started it."""
    lifetime.die_with_parent()
    seed_this_process()


def seed_this_process() -> None:
    """In the rollout process, before TRL draws any."""
    if seed := os.environ.get(_SEED):
        random.seed(seed)


def facts(
    args: Any, *, attention: str, begins_with: str, first_step: int, eval_samples: int = 0
) -> dict[str, Any]:
    """What a start is made with, by TRL's own `args`; seeds the rollouts that it will make."""
    return {
        "versions": versions(),
        "sync": "adapters by name, through the gateway",
        "attention": attention,
        "begins_with": begins_with or "a new adapter",
        "seeds": {
            "train": args.seed,
            "data": args.data_seed if args.data_seed is not None else args.seed,
            "rollouts": seed_rollouts(args.seed, first_step),
            "eval": f"0..{eval_samples - 1}" if eval_samples else "none",
        },
    }


def tell(found: Mapping[str, Any], events: Events) -> None:
    """To the run's history and to train.log."""
    events.setup(found)
    if is_first_rank():
        print("\n".join(lines(found)), flush=True)


def lines(facts: Mapping[str, Any]) -> list[str]:
    """One line a fact."""
    return [f"{name}: {_shown(value)}" for name, value in facts.items()]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value)
