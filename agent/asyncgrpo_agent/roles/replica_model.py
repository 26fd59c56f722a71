"""The model of a replica: a folder, a model of a hub, or what the trainer says that the run has.

While the trainer has not said which commit its revision means, and while the model is loaded, the
replica is JOINING, and its reason says so.
"""

from __future__ import annotations

import dataclasses
from typing import Final, get_args

from msgspec import structs

from asyncgrpo_agent.config.kinds import LoraRank
from asyncgrpo_agent.config.sections import Config, Engine
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.run_record import DEFAULT_REVISION, RunRecord, is_commit, known_commit
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.roles.model_source import Tell, checked_digest, have_model, with_model
from asyncgrpo_agent.roles.run_record_link import record_awaited

_RANKS: Final[tuple[int, ...]] = get_args(LoraRank)


async def model_of_replica(config: Config, join: Join, tell: Tell) -> tuple[Config, str]:
    """The configuration with a folder that holds the model, and the model's digest.

    Raises ConfigError.
    """
    if not config.model.path:
        config = await _loaded(config, join, tell)
    return config, await checked_digest(config, config.model.path, tell)


async def _loaded(config: Config, join: Join, tell: Tell) -> Config:
    record = None
    if not (config.model.id and is_commit(config.model.revision)):
        record = await record_awaited(config, join, tell, needed=True)
    if record is not None:
        config = _with_limits(config, record)
        if not config.model.id:
            config = _as_recorded(config, record)
    model, revision = config.model.id, config.model.revision
    commit = known_commit(model, revision, record)
    loaded = await have_model(config, commit or revision or DEFAULT_REVISION, tell)
    is_of_run = record is not None and record.id == model
    name = record.model_name if record is not None and is_of_run else config.model_name
    return with_model(config, loaded, name)


def _as_recorded(config: Config, record: RunRecord) -> Config:
    if not record.id:
        raise ConfigError(
            f"missing, and the trainer of run {record.run} has its model in a folder",
            where="model.path",
            fix="Copy that model to this host and give its folder: --model DIR",
        )
    model = structs.replace(config.model, id=record.id, revision=record.commit)
    return dataclasses.replace(config, model=model)


def _with_limits(config: Config, record: RunRecord) -> Config:
    """What the run needs, where nobody has chosen anything on this host."""
    engine, default = config.engine, Engine()
    if engine.max_loras == default.max_loras:
        engine = structs.replace(engine, max_loras=max(engine.max_loras, record.max_loras))
    if engine.max_lora_rank == default.max_lora_rank:
        needed = max(engine.max_lora_rank, record.lora_rank)
        rank = next((rank for rank in _RANKS if rank >= needed), _RANKS[-1])
        engine = structs.replace(engine, max_lora_rank=rank)
    return dataclasses.replace(config, engine=engine)
