"""What a new run begins with comes out of the bucket, verified with its own run's key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.config.sections import Agent, Bucket, Config, Train
from asyncgrpo_agent.core.commits import RESULTS
from asyncgrpo_agent.errors import AgentError, ConfigError
from asyncgrpo_agent.roles.trainer_origin import Origin, bring
from asyncgrpo_agent.store import identity
from asyncgrpo_agent.store.history import read
from fakes import fleet
from fakes.bucket import PUBLIC_KEY, FakeTrainer
from fakes.fleet import Site

MODEL = "ab" * 32


@pytest.fixture
def earlier(tmp_path: Path) -> FakeTrainer:
    (tmp_path / "bucket").mkdir()
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "first")
    for version in (3, 4):
        trainer.publish(version)
    return trainer


async def brought(folder: Path, wanted: str, digest: str = MODEL) -> Origin | None:
    config = Config(
        role="trainer",
        agent=Agent(state_dir=str(folder / "state")),
        bucket=Bucket(path=str(folder / "bucket")),
        train=Train(init_from=wanted),
    )
    return await bring(config, "second", digest)


def is_copy(origin: Origin | None, saved: Path) -> bool:
    assert origin is not None
    return all((origin.folder / p.name).read_bytes() == p.read_bytes() for p in saved.iterdir())


async def test_the_result_comes_first_and_any_version_can_be_named(
    earlier: FakeTrainer, tmp_path: Path
) -> None:
    identity.add_run(tmp_path / "state", "first", PUBLIC_KEY)
    assert await brought(tmp_path, "") is None
    assert is_copy(await brought(tmp_path, "first"), earlier.folder / "v4")
    assert is_copy(await brought(tmp_path, "first@3"), earlier.folder / "v3")
    with pytest.raises(ConfigError, match="has no result"):
        await brought(tmp_path, "first@final")
    earlier.publish(50, shelf=RESULTS)
    for wanted in ("first", "first@final"):
        assert is_copy(await brought(tmp_path, wanted), earlier.folder / "v50")
    assert is_copy(await brought(tmp_path, "first@newest"), earlier.folder / "v4")


@pytest.mark.parametrize(
    ("wanted", "digest", "text"),
    [
        ("second", MODEL, "is the run itself"),
        ("third", MODEL, "the public key of run 'third' is not known here"),
        ("first@9", MODEL, "version 9 of attempt a0001-7f3c is not in the bucket"),
        ("first@4", "cd" * 32, "was trained on another model"),
    ],
)
async def test_what_cannot_be_begun_with_is_a_matter_of_configuration(
    earlier: FakeTrainer, tmp_path: Path, wanted: str, digest: str, text: str
) -> None:
    identity.add_run(tmp_path / "state", "first", PUBLIC_KEY)
    with pytest.raises(ConfigError, match=text) as error:
        await brought(tmp_path, wanted, digest)
    assert "train.init_from" in error.value.where
    assert error.value.exit_code == 78


async def test_one_that_the_run_did_not_sign_is_not_taken(
    earlier: FakeTrainer, tmp_path: Path
) -> None:
    identity.add_run(tmp_path / "state", "first", PUBLIC_KEY)
    earlier.publish(5, private_key=bytes(32))
    with pytest.raises(AgentError, match="not signed with the run's key"):
        await brought(tmp_path, "first@5")
    assert is_copy(await brought(tmp_path, "first"), earlier.folder / "v4")


# --- whole roles -----------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with fleet.site(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_a_start_with_an_unknown_run_ends_before_anything_trains(site: Site) -> None:
    site.proxy()
    trainer = site.trainer(2, "--init-from=nothing@3")
    assert trainer.process.wait(60) == 78, trainer.text()
    assert "train.init_from 'nothing@3'" in trainer.text()
    history = site.folder / "trainer" / "trainer" / "demo" / "history.jsonl"
    assert "origin" not in [record["kind"] for record in read(history)]
