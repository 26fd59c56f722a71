"""Which model a replica takes, and with which limits, as far as that needs no hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Agent, Config, Engine, Model
from asyncgrpo_agent.core.run_record import RunRecord
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.roles.model_source import checked_digest
from asyncgrpo_agent.roles.replica_model import _as_recorded, _with_limits
from asyncgrpo_agent.store import model_packs
from fakes.fleet import model_folder

RECORD = RunRecord(
    run="demo", model_name="base", id="acme/tiny", commit="ab" * 20, max_loras=12, lora_rank=24
)


@pytest.mark.parametrize(
    ("engine", "max_loras", "rank"),
    [
        (Engine(), 12, 32),
        (Engine(max_loras=9), 9, 32),  # this host's own word
        (Engine(max_lora_rank=8), 12, 8),
    ],
)
def test_limits_are_the_runs_where_this_host_says_nothing(
    engine: Engine, max_loras: int, rank: int
) -> None:
    found = _with_limits(Config(role="replica", engine=engine), RECORD).engine
    assert (found.max_loras, found.max_lora_rank) == (max_loras, rank)


def test_limits_are_never_below_the_defaults() -> None:
    record = RunRecord(run="demo", model_name="base", max_loras=5, lora_rank=1)
    assert _with_limits(Config(role="replica"), record).engine == Engine()


def test_without_a_model_of_its_own_it_takes_the_trainers() -> None:
    config = _as_recorded(Config(role="replica"), RECORD)
    assert (config.model.id, config.model.revision) == ("acme/tiny", RECORD.commit)


def test_a_trainers_folder_cannot_be_taken() -> None:
    record = RunRecord(run="demo", model_name="base")
    with pytest.raises(ConfigError, match="the trainer of run demo has its model in a folder"):
        _as_recorded(Config(role="replica"), record)


async def test_a_damaged_pack_is_refused_by_the_files_name(tmp_path: Path) -> None:
    source, pack = model_folder(tmp_path), tmp_path / "pack"
    model_packs.write(source, model_packs.files_of(source), pack, model_packs.About())
    config = Config(role="replica", agent=Agent(state_dir=str(tmp_path)), model=Model(path="x"))
    said: list[str] = []
    assert await checked_digest(config, str(pack), said.append)
    assert said == ["checking every file of pack"]
    (pack / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        await checked_digest(config, str(pack), said.append)
