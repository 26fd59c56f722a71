"""Packs of models: written whole or not at all, and every file of one is checked."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - sha256sum reads them too
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError, StoreError
from asyncgrpo_agent.store import model_packs
from asyncgrpo_agent.store.model_packs import ABOUT, SUMS, About
from fakes.fleet import model_folder

ORIGIN = About(id="acme/tiny", commit="ab" * 20)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    source = model_folder(tmp_path)
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "LICENSE").write_text("free\n")
    target = tmp_path / "pack" / "tiny"
    model_packs.write(source, model_packs.files_of(source), target, ORIGIN)
    return target


def refusal(folder: Path, stamps: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        model_packs.verify(folder, stamps)
    assert str(folder) in caught.value.where
    return caught.value.what


def test_a_pack_holds_what_engines_read_and_where_it_is_from(pack: Path) -> None:
    names = {path.name for path in pack.iterdir()}
    assert names == {"LICENSE", "config.json", "model.safetensors", ABOUT, SUMS}
    assert model_packs.is_pack(pack)
    assert model_packs.about(pack) == ORIGIN
    model_packs.verify(pack, None)
    done = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=pack)
    assert done.returncode == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("model.safetensors", flip, "model.safetensors is damaged"),
    ("model.safetensors", cut, "model.safetensors is damaged"),
    ("config.json", Path.unlink, "config.json is missing"),
    ("LICENSE", flip, "LICENSE is damaged"),
    (ABOUT, flip, f"{ABOUT} is damaged"),
    (SUMS, flip, f"{SUMS} is damaged"),
    ("extra.safetensors", Path.touch, "extra.safetensors is not of the pack"),
    ("modeling_evil.py", Path.touch, "modeling_evil.py is not of the pack"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES, ids=[row[2] for row in DAMAGES])
def test_what_is_wrong_is_named(
    pack: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    damage(pack / name)
    assert said in refusal(pack)


def test_all_that_is_wrong_is_named_at_once(pack: Path) -> None:
    flip(pack / "model.safetensors")
    (pack / "config.json").unlink()
    said = refusal(pack)
    assert "model.safetensors is damaged" in said
    assert "config.json is missing" in said


def test_sums_that_were_cut_or_lead_elsewhere(pack: Path) -> None:
    sums = pack / SUMS
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if "config.json" not in line))
    assert refusal(pack) == f"{SUMS} is cut"
    sums.write_text("".join(lines) + f"{'0' * 64}  ../../etc/passwd\n")
    assert refusal(pack) == f"{SUMS} is damaged"


def test_a_pack_is_read_once_and_again_when_a_file_has_changed(pack: Path, tmp_path: Path) -> None:
    stamps, weights = tmp_path / "stamps", pack / "model.safetensors"
    model_packs.verify(pack, stamps)
    before = weights.stat()
    flip(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    model_packs.verify(pack, stamps)  # nothing shows: same file, size and time
    os.utime(weights)
    assert "model.safetensors is damaged" in refusal(pack, stamps)
    assert "model.safetensors is damaged" in refusal(pack, stamps)


def test_stamps_that_cannot_be_kept_cost_nothing_but_time(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model_packs.verify(pack, tmp_path / "file")


def test_a_folder_that_is_there_is_left_alone(pack: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        model_packs.write(tmp_path / "tiny", {"config.json": 1}, pack, ORIGIN)
    model_packs.verify(pack, None)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        source = model_folder(tmp_path)
        (source / "tokenizer.json").write_bytes(bytes(200_000))
        with pytest.raises(StoreError, match="No space left") as caught:
            model_packs.write(source, model_packs.files_of(source), folder / "tiny", ORIGIN)
        assert "Make room" in caught.value.fix
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("count", "total", "said"),
    [(0, 0, "0.0 of 0.0 MB"), (5, 99_000_000, "0.0 of 99.0 MB"), (1, 3e9, "0.0 of 3.0 GB")],
)
def test_amounts(count: int, total: float, said: str) -> None:
    assert model_packs.amount(count, int(total)) == said
