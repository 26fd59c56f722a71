"""Models of a hub, with the library that the engine's Python really has, and a hub on this host."""

from __future__ import annotations

import dataclasses
import os
import subprocess  # noqa: TID251 - a disk is mounted
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.config.sections import Agent, Config, Engine, Model
from asyncgrpo_agent.errors import ChildExitedError, ConfigError
from asyncgrpo_agent.procs.model_download import Loaded
from asyncgrpo_agent.roles.model_source import have_model
from asyncgrpo_agent.store import model_downloads
from fakes import hub as hubs
from fakes.hub import MODEL, TOKEN, Hub, tiny_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NEEDED = {"config.json", "model.safetensors", "tokenizer.json"}
LARGE = 24_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hubs.served() as served:
        yield served


@pytest.fixture
def config(tmp_path: Path, engine_python: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return Config(
        role="replica",
        agent=Agent(state_dir=str(tmp_path / "state")),
        engine=Engine(python=engine_python),
        model=Model(id=MODEL),
    )


async def load(config: Config, revision: str = "main", tries: int = 1) -> tuple[Loaded, list[str]]:
    """The model, and what was said meanwhile."""
    said: list[str] = []
    with trio.fail_after(60):
        return await have_model(config, revision, said.append, tries=tries), said


async def refusal(config: Config, revision: str = "main") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        await load(config, revision)
    return caught.value


def log_of(config: Config) -> str:
    return (config.log_dir / "model-download.log").read_text()


async def test_what_engines_read_is_loaded_and_nothing_else(config: Config, hub: Hub) -> None:
    loaded, said = await load(config)
    assert loaded.commit == hub.refs["main"]
    assert set(loaded.files) == NEEDED
    assert {path.name for path in Path(loaded.folder).iterdir()} == NEEDED
    assert "loading acme/tiny: 0.0 of 0.0 MB" in said
    hub.requests.clear()
    assert (await load(config, loaded.commit))[0].folder == loaded.folder  # with one that asks
    hub.status, hub.requests = 503, []
    assert (await load(config, loaded.commit))[0].folder == loaded.folder
    assert hub.requests == []


async def test_code_comes_where_it_is_trusted(config: Config) -> None:
    trusting = Model(id=MODEL, trust_remote_code=True)
    loaded, _ = await load(dataclasses.replace(config, model=trusting))
    assert set(loaded.files) == {*NEEDED, "modeling_tiny.py"}


async def test_a_slow_download_says_how_far_it_has_come(config: Config, hub: Hub) -> None:
    commit = hub.commit(tiny_files(weight_bytes=LARGE))
    hub.gate.clear()
    said: list[str] = []

    def tell(reason: str) -> None:
        said.append(reason)
        if "10.5 of 24.0 MB" in reason:  # the library writes ten MiB at a time
            hub.gate.set()

    with trio.fail_after(60):
        loaded = await have_model(config, "main", tell)
    assert said[-1] == "loading acme/tiny: 24.0 of 24.0 MB"
    assert hub.gate.is_set()
    state = model_downloads.read(model_downloads.path_of(config.state_dir, MODEL, "main"))
    assert state is not None
    assert state.is_here
    assert state.commit == commit == loaded.commit


async def test_a_cut_connection_is_gone_on_with(config: Config, hub: Hub) -> None:
    hub.commit(tiny_files(weight_bytes=LARGE))
    hub.cut_after_bytes = 12_000_000
    loaded, _ = await load(config)
    assert Path(loaded.folder, "model.safetensors").stat().st_size > LARGE
    assert sum(" /store/" in request for request in hub.requests) == 2


async def test_a_killed_download_leaves_what_was_whole_and_no_process(
    config: Config, hub: Hub
) -> None:
    hub.commit(tiny_files(weight_bytes=LARGE))
    hub.gate.clear()
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:

            def tell(reason: str) -> None:
                if "10.5 of" in reason:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(have_model, config, "main", tell)
    hub.gate.set()
    hub.requests.clear()
    await load(config)
    assert not any("config.json" in request for request in hub.requests)


async def test_a_hub_that_is_away_is_waited_for(config: Config, hub: Hub) -> None:
    hub.status = 503
    said: list[str] = []

    def tell(reason: str) -> None:
        said.append(reason)
        if "it is tried again" in reason:
            hub.status = 0

    with trio.fail_after(60):
        await have_model(config, "main", tell)
    assert any("503" in reason for reason in said)
    hub.status = 503
    with pytest.raises(ChildExitedError, match=r"acme/tiny is not loaded: HfHubHTTPError: .*503"):
        await load(config, tries=1)


async def test_a_gated_model_says_what_to_do(config: Config, hub: Hub) -> None:
    hub.is_gated = True
    error = await refusal(config)
    assert "acme/tiny is gated" in error.what
    assert "HF_TOKEN" in error.what


async def test_a_private_model_needs_the_token_which_is_shown_to_the_hub_alone(
    config: Config, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.needs_token = True
    assert "the hub knows no model acme/tiny, or does not show it" in (await refusal(config)).what
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    loaded, said = await load(config)
    assert set(loaded.files) == NEEDED
    assert (hub.tokens, hub.store_tokens) == ({TOKEN}, set())
    assert TOKEN not in log_of(config) + "".join(said)
    kept = [path for path in config.state_dir.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in kept)


async def test_an_unknown_revision_is_named(config: Config) -> None:
    error = await refusal(config, "v9")
    assert "model.revision: acme/tiny has no revision v9" in error.what


async def test_a_model_without_safetensors_is_refused(config: Config, hub: Hub) -> None:
    files = tiny_files()
    del files["model.safetensors"]
    hub.commit(files)
    assert "acme/tiny has no *.safetensors file" in (await refusal(config)).what


async def test_offline_by_the_users_word(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in (await refusal(config)).what


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_that_is_too_small_is_said_before_anything_is_loaded(
    config: Config, hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(small_disk))
    hub.commit(tiny_files(weight_bytes=LARGE))
    error = await refusal(config)
    assert "24.0 MB are still to be loaded" in error.what
    assert "HF_HOME" in error.what
    assert not any(" /store/" in request for request in hub.requests)


async def test_a_disk_that_fills_meanwhile(
    config: Config, hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(small_disk))
    hub.commit(tiny_files(weight_bytes=3_000_000))
    hub.gate.clear()

    def tell(reason: str) -> None:
        if "of 3.0 MB" in reason and not hub.gate.is_set():
            (small_disk / "others").write_bytes(bytes(2_500_000))
            hub.gate.set()

    with trio.fail_after(60), pytest.raises(ConfigError, match="the disk is full"):
        await have_model(config, "main", tell, tries=1)
