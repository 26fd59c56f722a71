"""What an archive says of what is in it: of Python's libraries and the dashboard's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("contents", ROOT / "build" / "contents.py")
assert SPEC is not None
assert SPEC.loader is not None
contents: Any = importlib.util.module_from_spec(SPEC)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    import sys

    sys.modules["contents"] = contents  # dataclasses look there
    assert SPEC is not None
    assert SPEC.loader is not None
    SPEC.loader.exec_module(contents)


def test_libraries_of_npm_have_their_licence_and_their_row(tmp_path: Path) -> None:
    libraries, vendor = tmp_path / "libraries", tmp_path / "vendor"
    for folder in (libraries, vendor):
        folder.mkdir()
    (libraries / "libraries.json").write_text("[]")
    (tmp_path / "python").write_text("PSF")
    (vendor / "uPlot.LICENSE").write_text("MIT, of its author")
    packages = {"": {"license": "UNLICENSED"}, "node_modules/uplot": {"version": "1.6.32"}}
    packages["node_modules/uplot"]["license"] = "MIT"
    (vendor / "made-of.json").write_text(json.dumps({"packages": packages}))
    part = contents.Part("agent", [], "3.11.7", tmp_path / "python", libraries, vendor)
    contents.copy_licences(tmp_path / "LICENSES", [part])
    index = (tmp_path / "LICENSES" / "INDEX.tsv").read_text().splitlines()
    assert index[-1] == "agent\tuplot 1.6.32\tMIT"
    kept = tmp_path / "LICENSES" / "agent" / "uplot" / "LICENSE"
    assert kept.read_text() == "MIT, of its author"
    row = contents.part_rows(part)[-1]
    assert (row["purl"], row["licenses"]) == ("pkg:npm/uplot@1.6.32", [{"expression": "MIT"}])


def test_a_build_without_them_says_nothing_of_them() -> None:
    assert contents.web_libraries(None) == []
    assert contents.web_libraries(Path("/none")) == []


def test_what_is_shipped_is_named() -> None:
    vendor = ROOT / "agent" / "asyncgrpo_agent" / "web" / "vendor"
    if not vendor.exists():
        pytest.skip("scripts/web-install had no npm")
    assert [library.name for library in contents.web_libraries(vendor)] == ["uplot"]


def distribution(folder: Path, *, files: tuple[str, ...]) -> Any:
    info = folder / "quiet-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: quiet\nVersion: 1.2\nLicense: MIT\n"
    )
    for name in files:
        (info / name).write_text("may be given away")
    record = ["METADATA", "RECORD", *files]
    (info / "RECORD").write_text("".join(f"quiet-1.2.dist-info/{name},,\n" for name in record))
    (found,) = contents.distributions([str(folder)])
    return found


@pytest.mark.parametrize(("files", "kept"), [(("LICENSE",), ["LICENSE"]), ((), ["METADATA"])])
def test_a_wheel_without_a_licence_says_itself_what_it_is(
    tmp_path: Path, files: tuple[str, ...], kept: list[str]
) -> None:
    one = distribution(tmp_path, files=files)
    (tmp_path / "python").write_text("PSF")
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "libraries.json").write_text("[]")
    part = contents.Part("engine", [one], "3.11.7", tmp_path / "python", tmp_path / "libraries")
    contents.copy_licences(tmp_path / "LICENSES", [part])
    found = tmp_path / "LICENSES" / "engine" / "quiet"
    assert [file.name for file in found.iterdir()] == kept
    index = (tmp_path / "LICENSES" / "INDEX.tsv").read_text()
    assert "engine\tquiet 1.2\tMIT\n" in index
