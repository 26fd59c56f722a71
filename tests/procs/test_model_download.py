"""What the download child is told, and what its lines mean."""

from __future__ import annotations

from pathlib import Path

from asyncgrpo_agent.procs.model_download import Progress, Reader, download_command, hub_home


def test_the_command_names_model_and_revision(tmp_path: Path) -> None:
    argv, additions = download_command(
        "/e/python", "acme/tiny", "main", trust_remote_code=True, scratch=tmp_path
    )
    assert argv == [
        *("/e/python", "-m", "asyncgrpo_engine.download", "acme/tiny", "main"),
        "--trust-remote-code",
    ]
    assert Path(additions["PYTHONPATH"], "asyncgrpo_engine", "download.py").is_file()


def test_lines_are_put_together_and_others_passed_over() -> None:
    reader = Reader()
    assert reader.take("Trying to resume download...") is None
    assert reader.take("{broken") is None
    said = '{"progress": {"commit": "c", "bytes": 1, "of_bytes": 3}}'
    assert reader.take(said) == Progress("c", 1, 3)
    reader.take('{"files": {"config.json": 2}}')
    reader.take('{"files": {"model.safetensors": 1}}')
    assert reader.loaded is None
    reader.take('{"model": {"commit": "c", "folder": "/m"}}')
    assert reader.loaded is not None
    assert reader.loaded.files == {"config.json": 2, "model.safetensors": 1}


def test_models_go_where_the_hub_puts_them_unless_there_is_no_home(tmp_path: Path) -> None:
    assert hub_home(tmp_path, Path("/s")) == {}
    assert hub_home(tmp_path / "none", Path("/s")) == {"HF_HOME": "/s/cache/huggingface"}
