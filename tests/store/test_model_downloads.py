"""What a host knows of models that it has loaded."""

from __future__ import annotations

import os
from pathlib import Path

from asyncgrpo_agent.store import model_downloads
from asyncgrpo_agent.store.model_downloads import Download, of_model, path_of, read, write


def whole(folder: Path) -> Download:
    (folder / "config.json").write_text("{}")
    return Download(id="acme/tiny", commit="c", folder=str(folder), files={"config.json": 2})


def test_one_that_is_here_until_a_file_is_gone_or_cut(tmp_path: Path) -> None:
    path = path_of(tmp_path, "acme/tiny", "main")
    write(path, whole(tmp_path))
    kept = read(path)
    assert kept is not None
    assert kept.is_here
    (tmp_path / "config.json").write_text("{")
    assert not kept.is_here
    (tmp_path / "config.json").unlink()
    assert not kept.is_here
    assert not Download(id="acme/tiny").is_here


def test_nothing_and_nonsense_are_nothing(tmp_path: Path) -> None:
    path = path_of(tmp_path, "acme/tiny", "main")
    assert read(path) is None
    path.parent.mkdir()
    path.write_text("{")
    assert read(path) is None


def test_no_revision_leads_out_of_the_folder(tmp_path: Path) -> None:
    path = path_of(tmp_path, "acme/tiny", "../../x/refs pr/1")
    assert path.parent == tmp_path / "models"


def test_all_revisions_of_one_model_the_newest_first(tmp_path: Path) -> None:
    for number, (model, revision) in enumerate(
        [("acme/tiny", "main"), ("acme/tiny", "v2"), ("acme/tiny2", "main")]
    ):
        path = path_of(tmp_path, model, revision)
        write(path, Download(id=model, commit=revision))
        os.utime(path, (number, number))
    assert [one.commit for one in of_model(tmp_path, "acme/tiny")] == ["v2", "main"]
    assert model_downloads.of_model(tmp_path, "acme/none") == []
