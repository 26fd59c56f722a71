"""Where a trainer's start goes on: which checkpoint, and whether the settings still fit it.

A run is its name, so a start resumes what the run has. Candidates are the newest whole checkpoint
on this host and the manifests in the bucket. They are ordered by attempt, then by step: what an
older attempt did after a newer one had begun is a branch that nobody follows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncgrpo_agent.core.checkpoints import CheckpointKey

_SAME_SHAPE: Final = frozenset({"train.lora.lora_dropout", "train.lora.inference_mode"})
_SECRET: Final = frozenset({"hub_token", "push_to_hub_token"})
_UNSET: Final = "unset"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnThisHost:
    """The newest whole checkpoint on local disk, and the last attempt that started here."""

    step: int
    attempt_number: int


Candidate = OnThisHost | CheckpointKey


def candidates(
    local: OnThisHost | None, listed: Mapping[str, Collection[CheckpointKey]]
) -> list[Candidate]:
    """Best first. Of two that are alike, the one on this host: it need not be copied."""
    found: list[Candidate] = [key for keys in listed.values() for key in keys]
    if local is not None:
        found.append(local)
    return sorted(found, key=_rank, reverse=True)


def _rank(candidate: Candidate) -> tuple[int, int, bool, int]:
    is_local = isinstance(candidate, OnThisHost)
    retry = 0 if isinstance(candidate, OnThisHost) else candidate.retry
    return candidate.attempt_number, candidate.step, is_local, retry


# --- settings --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs from the one that the checkpoint was made with; as JSON texts."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"

    @property
    def fits(self) -> bool:
        """Whether the checkpoint's adapter still means the same."""
        return not self.key.startswith("train.lora.") or self.key in _SAME_SHAPE


def settings(
    *,
    script: str = "",
    script_args: list[str] | None = None,
    task: Mapping[str, Any] | None = None,
    passthrough: Mapping[str, Any],
    lora: Mapping[str, Any],
) -> dict[str, str]:
    """What a checkpoint is made with, as one JSON text for each dotted key. No secrets.

    `task` is data, rewards and tools; what is empty there is left out.
    """
    named: dict[str, Any] = {
        "train.script": script,
        "train.script_args": script_args,
    }
    named |= {f"train.{key}": value for key, value in (task or {}).items()}
    values: dict[str, Any] = {key: value for key, value in named.items() if value}
    values |= {f"train.{key}": value for key, value in passthrough.items() if key not in _SECRET}
    values |= {f"train.lora.{key}": value for key, value in lora.items()}
    return {key: json.dumps(value, sort_keys=True) for key, value in sorted(values.items())}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """By key. Nothing is known of a checkpoint that carries no settings."""
    if not before:
        return []
    return [
        Change(key, before.get(key, _UNSET), now.get(key, _UNSET))
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def is_finished(step: int, passthrough: Mapping[str, Any]) -> bool:
    """Whether a run that has come to `step` has nothing more to do."""
    max_steps = passthrough.get("max_steps")
    return isinstance(max_steps, int) and 0 < max_steps <= step
