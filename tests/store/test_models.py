import json
from pathlib import Path

import pytest

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store.models import model_digest
from fakes.adapters import safetensors

WEIGHTS = {"a": ([2, 2], bytes(range(16))), "b": ([4], bytes(range(16, 32)))}


def model(folder: Path, *shards: dict[str, tuple[list[int], bytes]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for number, shard in enumerate(shards):
        (folder / f"model-{number}.safetensors").write_bytes(safetensors(shard))
    return folder


def test_sharding_and_the_folder_do_not_matter(tmp_path: Path) -> None:
    one = model(tmp_path / "one", WEIGHTS)
    two = model(tmp_path / "two", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]})
    assert model_digest(one) == model_digest(two)


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    other = {**WEIGHTS, "b": ([4], bytes(16))}
    one, two = model(tmp_path / "one", WEIGHTS), model(tmp_path / "two", other)
    assert model_digest(one) != model_digest(two)


def test_copies_that_nothing_loads_do_not_count(tmp_path: Path) -> None:
    one = model(tmp_path / "one", WEIGHTS)
    two = model(tmp_path / "two", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]})
    (two / "consolidated.safetensors").write_bytes(safetensors({"x": ([2], bytes(8))}))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-0.safetensors"}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_digest(one) == model_digest(two)
    (two / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-1\.safetensors"):
        model_digest(two)
    (two / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no index of weights"):
        model_digest(two)
    (two / "model.safetensors.index.json").unlink()
    (two / "model.safetensors").write_bytes(safetensors(WEIGHTS))
    assert model_digest(one) == model_digest(two)


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_digest(tmp_path / "empty")
    with pytest.raises(ConfigError, match="safetensors"):
        model_digest(model(tmp_path / "bare"))
    broken = model(tmp_path / "broken", WEIGHTS)
    (broken / "model-0.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        model_digest(broken)
