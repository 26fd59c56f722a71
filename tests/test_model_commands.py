"""`model pack` and `model verify`, as a user meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncgrpo_agent import cli
from asyncgrpo_agent.errors import EXIT_CONFIG, EXIT_USAGE
from fakes import hub as hubs
from fakes.fleet import model_folder
from fakes.hub import MODEL


def test_a_folder_becomes_a_pack_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, pack = model_folder(tmp_path), tmp_path / "packs" / "tiny"
    assert cli.main(["model", "pack", str(source), str(pack)]) == 0
    assert f"{pack}: 2 files" in capsys.readouterr().out
    assert cli.main(["model", "verify", str(pack)]) == 0
    assert f"{pack} is whole" in capsys.readouterr().out
    (pack / "config.json").write_text("{}")
    assert cli.main(["model", "verify", str(pack)]) == EXIT_CONFIG
    assert "config.json is damaged" in capsys.readouterr().err


def test_what_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_folder(tmp_path)
    assert cli.main(["model", "pack", str(source), str(source)]) == EXIT_CONFIG
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["no-such-folder", "https://hub.example.org/acme/tiny"])
def test_neither_a_folder_nor_a_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["model", "pack", model, str(tmp_path / "new")]) == EXIT_USAGE
    assert "neither a folder nor OWNER/NAME" in capsys.readouterr().err


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    argv = ["model", "pack", str(tmp_path / "empty"), str(tmp_path / "new")]
    assert cli.main(argv) == EXIT_CONFIG
    assert "is not a model" in capsys.readouterr().err


def test_a_folder_that_is_no_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "verify", str(model_folder(tmp_path))]) == EXIT_CONFIG
    assert "is no pack" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_a_model_of_a_hub_becomes_a_pack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("ASYNCGRPO_ENGINE_PYTHON", "")
    if not python:
        pytest.skip("ASYNCGRPO_ENGINE_PYTHON names no Python with vLLM and TRL")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    pack = tmp_path / "tiny"
    with hubs.served() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        flags = [f"--engine-python={python}", f"--state-dir={tmp_path}/state"]
        assert cli.main(["model", "pack", MODEL, str(pack), *flags]) == 0
        commit = hub.refs["main"]
        assert f"commit {commit}" in capsys.readouterr().out
        assert json.loads((pack / "asyncgrpo-model.json").read_bytes())["commit"] == commit
        assert not (pack / "model.safetensors").is_symlink()
        assert cli.main(["model", "verify", str(pack)]) == 0
        argv = ["model", "pack", MODEL, str(tmp_path / "v9"), "--model-revision=v9", *flags]
        assert cli.main(argv) == EXIT_CONFIG
        assert "acme/tiny has no revision v9" in capsys.readouterr().err
        hub.status = 503
