"""The adapter that a new run begins with: one of an earlier run in the same bucket.

It is verified as any adapter is, with the key of the run that made it, and copied to this host's
disk. Whether it has the shape that is to be trained is found out beside TRL, before anything heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.lora import VLLM_RANKS
from asyncgrpo_agent.errors import AgentError, BucketUnavailableError, ConfigError
from asyncgrpo_agent.roles.adapter_reader import RunReader
from asyncgrpo_agent.roles.adapter_results import ResultReader
from asyncgrpo_agent.roles.adapter_sources import Results, public_key
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_job import run_folder
from asyncgrpo_agent.store import staging


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A verified copy; `name` is the adapter's physical name in its own run."""

    name: str
    run: str
    digest: str
    folder: Path


async def bring(config: Config, run: str, base_model_digest: str) -> Origin | None:
    """What `train.init_from` names, for the run `run`; None without that. Raises ConfigError if it
    cannot be begun with, BucketUnavailableError if it cannot be had now."""
    wanted = config.train.init_from
    if not wanted:
        return None
    other, _, version = wanted.partition("@")
    where = f"train.init_from {wanted!r}"
    if other == run:
        raise ConfigError("is the run itself", where=where, fix="Leave it out: a run resumes")
    key = public_key(config, other)
    if key is None:
        raise ConfigError(
            f"the public key of run {other!r} is not known here",
            where=where,
            fix=f"Make it known: asyncgrpo-agent run add {other} --public-key KEY --state-dir"
            f" {config.state_dir}",
        )
    async with BucketHost(config.bucket.path, other, config.agent).running() as bucket:
        try:
            commit = await _chosen(bucket, other, version, key)
        except BucketUnavailableError:
            raise
        except AgentError as error:
            raise ConfigError(error.what, where=f"{where}: {error.where}", fix=error.fix) from error
        if commit.base_model_digest != base_model_digest:
            raise ConfigError(
                f"was trained on another model ({commit.base_model}) than model.path holds",
                where=where,
                fix="Give that model, or begin without an adapter",
            )
        folder = run_folder(config.state_dir, run) / "origin"
        staging.clean(folder)
        staged = await bucket.stage(commit, folder, max_rank=max(VLLM_RANKS))
    return Origin(
        name=commit.adapter.name, run=other, digest=commit.adapter.digest, folder=staged.path
    )


async def _chosen(bucket: Results, run: str, version: str, key: bytes) -> Commit:
    """Without a version, or "final": the result, which only "final" insists on."""
    results = ResultReader(bucket, run, key)
    if version == "final":
        return await results.needed()
    if not version and (found := await results.newest()) is not None:
        return found
    reader = RunReader(bucket, run, key)
    attempt, versions = await reader.attempt("")
    if version in ("", "newest"):
        return await reader.first_readable([k for keys in versions.values() for k in keys])
    number = int(version.removeprefix("v"))
    if number not in versions:
        raise AgentError(
            f"version {number} of attempt {attempt} is not in the bucket",
            where=f"run {run}",
            fix=f"It has {len(versions)} from {min(versions)} to {max(versions)}",
        )
    return await reader.first_readable(versions[number])
