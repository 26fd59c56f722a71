"""Which files of a model are loaded, and what the cache's folder says of them."""

from __future__ import annotations

import os
from pathlib import Path

from asyncgrpo_engine import download

SHARDED = {
    "config.json": 1,
    "model-00001-of-00002.safetensors": 10,
    "model-00002-of-00002.safetensors": 10,
    "model.safetensors.index.json": 1,
    "tokenizer.model": 1,
    "chat_template.jinja": 1,
    "additional_chat_templates/tool_use.jinja": 1,
}


def test_what_engines_read_is_wanted() -> None:
    others = {
        "pytorch_model.bin": 20,
        "consolidated.safetensors": 20,
        "original/consolidated.00.pth": 20,
        "onnx/model.onnx": 20,
        "modeling_x.py": 1,
        ".gitattributes": 1,
    }
    assert download.wanted({**SHARDED, **others}, has_code=False) == SHARDED
    with_code = {**SHARDED, "modeling_x.py": 1}
    assert download.wanted({**SHARDED, **others}, has_code=True) == with_code


def test_weights_in_their_makers_layout_alone_are_wanted() -> None:
    sizes = {"config.json": 1, "consolidated.safetensors": 20}
    assert download.wanted(sizes, has_code=False) == sizes


def test_loaded_bytes_are_those_of_the_models_own_files(tmp_path: Path) -> None:
    blobs = {"aa": 10, "bb": 20, "cc": 30}
    (tmp_path / "aa").write_bytes(bytes(10))
    (tmp_path / "zz").write_bytes(bytes(99))  # of another commit
    (tmp_path / "bb.12345678.incomplete").write_bytes(bytes(5))
    left = tmp_path / "cc.12345678.incomplete"  # of a download that was killed
    left.write_bytes(bytes(29))
    os.utime(left, (1, 1))
    assert download._loaded_bytes(tmp_path, blobs, 2.0) == 15
    download._sweep(tmp_path, blobs)
    assert not left.exists()
    assert (tmp_path / "bb.12345678.incomplete").exists()
    assert download._loaded_bytes(tmp_path / "none", blobs, 0) == 0
