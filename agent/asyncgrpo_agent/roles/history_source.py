"""Where a run's history is read from: the trainer's own file, or the bucket, which has it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.segments import Joined, decode
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.roles.adapter_sources import bucket_source
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_job import history_file
from asyncgrpo_agent.store import history

Take = Callable[[Mapping[str, Any]], None]
_ANY_RUN: Final = "-"  # cannot be the name of one


def read_local(path: Path) -> Iterator[dict[str, Any]]:
    """Raises AgentError."""
    try:
        for record in history.read(path):
            if isinstance(record, dict):
                yield record
    except OSError as error:
        raise AgentError(f"cannot be read: {error.strerror}", where=str(path)) from error


def local_runs(state_dir: Path) -> list[str]:
    """The runs that a trainer has recorded on this host."""
    return sorted(path.parent.name for path in (state_dir / "trainer").glob("*/history.jsonl"))


def local_history(state_dir: Path, run: str) -> Path | None:
    path = history_file(state_dir, run)
    return path if path.is_file() else None


async def recorded_runs(config: Config) -> list[str]:
    """The runs that have a history in the bucket. Raises StoreError."""
    async with bucket_source(config, _ANY_RUN) as bucket:
        return await bucket.list_recorded_runs()


async def fold_bucket(config: Config, run: str, take: Take) -> None:
    """Hand on all records of a run, oldest first, each once. Raises StoreError."""
    async with bucket_source(config, run) as bucket:
        await fold(bucket, take)


async def fold(bucket: BucketHost, take: Take) -> None:
    """The same of the run of this host. One answer of the bucket is held at a time."""
    joined, keys = Joined(), await bucket.list_segments()
    while keys:
        found = await bucket.read_segments(keys)
        for data in found:
            await trio.lowlevel.checkpoint()
            if (segment := decode(data)) is not None:
                for record in joined.add(segment):
                    take(record)
        keys = keys[len(found) :]
