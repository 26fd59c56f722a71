"""What a run was made with: versions, devices, ways and seeds; printed, and kept in its history."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

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


def seed_this_process() -> None:
    """In the rollout process, before TRL draws any."""
    if seed := os.environ.get(_SEED):
        random.seed(seed)


def lines(facts: Mapping[str, Any]) -> list[str]:
    """One line a fact."""
    return [f"{name}: {_shown(value)}" for name, value in facts.items()]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items())
    return str(value)
