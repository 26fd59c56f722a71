"""The model of a trainer, and the record that tells the run's replicas which one that is.

The first start of a run decides which commit its revision is; each later one, on any host, goes on
with that, until the configuration names another revision or another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.run_record import (
    DEFAULT_REVISION,
    RunRecord,
    is_commit,
    known_commit,
    sealed,
    unsealed,
)
from asyncgrpo_agent.core.slots import needed_slots
from asyncgrpo_agent.errors import AdapterRefusedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.model_source import Tell, checked_digest, have_model, with_model
from asyncgrpo_agent.roles.run_record_link import record_awaited
from asyncgrpo_agent.roles.trainer_job import max_staleness
from asyncgrpo_agent.store import model_packs, run_records

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """`config` has the model's folder, whatever it was given as. `record` is sealed."""

    config: Config
    digest: str
    record: bytes


async def model_of_trainer(config: Config, join: Join, tell: Tell) -> TrainerModel:
    """Have the model, and note what the run now is. Raises ConfigError, StoreError."""
    model, revision, commit = config.model.id, config.model.revision, ""
    if model:
        before = None if is_commit(revision) else await _recorded(config, join, tell)
        wanted = known_commit(model, revision, before) or revision or DEFAULT_REVISION
        loaded = await have_model(config, wanted, tell)
        config = with_model(config, loaded, config.model_name)
        commit = loaded.commit
    elif model_packs.is_pack(Path(config.model.path)):
        about = model_packs.about(Path(config.model.path))
        model, commit = about.id, about.commit
    digest = await checked_digest(config, config.model.path, tell)
    rank = config.train.lora.get("r", 0)
    record = RunRecord(
        run=join.run,
        model_name=config.model_name,
        id=model,
        revision=revision,
        commit=commit,
        max_loras=max(0, needed_slots(max_staleness(config))),
        lora_rank=rank if isinstance(rank, int) else 0,
    )
    assert join.run_private_key is not None
    data = sealed(record, join.run_private_key)
    _keep(config, join.run, data)
    if commit:
        log.info("model.chosen", model=model, commit=commit, digest=digest)
    return TrainerModel(config, digest, data)


async def _recorded(config: Config, join: Join, tell: Tell) -> RunRecord | None:
    """What an earlier start has said: on this host, else what the proxy has of another's."""
    try:
        data = run_records.read(run_records.of_trainer(config.state_dir, join.run))
        if data:
            return unsealed(data, join.run, join.run_public_key)
    except (OSError, AdapterRefusedError) as error:
        log.warning("record.unread", run=join.run, reason=str(error))
    return await record_awaited(config, join, tell, needed=False)


def _keep(config: Config, run: str, data: bytes) -> None:
    try:
        run_records.write(run_records.of_trainer(config.state_dir, run), data)
    except OSError as error:  # the proxy has it too
        log.warning("record.unsaved", run=run, reason=error.strerror)
