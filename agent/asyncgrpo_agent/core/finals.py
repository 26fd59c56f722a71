"""Where a run's result is in the bucket: the adapter of its last step, under a commit.

    final/a0003-7f3c/s000500.toml          the commit, written last
    final/a0003-7f3c/s000500/<files>       a stock PEFT folder; a retry takes s000500-rN

A run whose `max_steps` has grown has several. Its result is the one with the highest step of the
highest attempt; none is ever removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from asyncgrpo_agent.core.adapters import CommitKey, is_attempt, parse_attempt

FOLDER: Final = "final"
_KEY_RE: Final = re.compile(
    r"final/(?P<attempt>[^/]+)/s(?P<step>\d{6}|[1-9]\d{6,8})(?:-r(?P<retry>[1-9]\d?))?\.toml",
    re.ASCII,
)


def final_folder(attempt: str, step: int, retry: int = 0) -> str:
    suffix = f"-r{retry}" if retry else ""
    return f"{FOLDER}/{attempt}/s{step:06d}{suffix}"


def final_key(attempt: str, step: int, retry: int = 0) -> str:
    return f"{final_folder(attempt, step, retry)}.toml"


def parse_final_key(key: str) -> CommitKey | None:
    """The parts of a result's commit, whose `version` is the step; None for any other key."""
    match = _KEY_RE.fullmatch(key)
    if match is None or not is_attempt(match["attempt"]):
        return None
    return CommitKey(
        attempt=match["attempt"], version=int(match["step"]), retry=int(match["retry"] or 0)
    )


def newest_first(keys: Iterable[str]) -> list[str]:
    """By attempt, then by step; what is no key of a result is left out."""
    found = [(parts, key) for key in keys if (parts := parse_final_key(key)) is not None]
    return [key for _, key in sorted(found, key=lambda row: _age(row[0]), reverse=True)]


def _age(parts: CommitKey) -> tuple[int, int, int, str]:
    return parse_attempt(parts.attempt).number, parts.version, parts.retry, parts.attempt
