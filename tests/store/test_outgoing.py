from pathlib import Path

import pytest

from asyncgrpo_agent.core.adapters import AdapterId
from asyncgrpo_agent.store.outgoing import CHUNK_BYTES, OpenAdapter

ADAPTER = AdapterId(run="run", attempt="a0001-7f3c", version=1, digest="ab" * 32)


def opened(*paths: Path) -> OpenAdapter:
    return OpenAdapter(ADAPTER, "commits/key.toml", b"sealed", paths)


def test_files_come_one_after_another_in_bounded_pieces(tmp_path: Path) -> None:
    sizes = [1, 0, 2 * CHUNK_BYTES + 5]
    files = [tmp_path / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes([size % 251]) * size)
    source = opened(*files)
    for file in files:
        file.unlink()
    pieces = list(iter(source.read, b""))
    source.close()
    assert max(map(len, pieces)) == CHUNK_BYTES
    assert b"".join(pieces) == b"".join(bytes([s % 251]) * s for s in sizes)
    assert source.read() == b""


def test_none_stays_open_when_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileNotFoundError):  # an open file left behind would be a ResourceWarning
        opened(tmp_path / "a", tmp_path / "b")
