"""What a base model is, whatever its folder is called: a digest of its tensors and some of them.

Two hosts that hold the same weights get the same digest even when the files are sharded
differently. It reads headers and a few bytes a tensor, never the whole weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from asyncgrpo_agent.errors import ConfigError

_SAMPLE_BYTES: Final = 64
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit


def model_digest(folder: Path) -> str:
    """sha256, in hex, over every tensor's name, dtype, shape and a sample from its middle.

    Raises ConfigError when the folder is no model that both vLLM and TRL can read.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "is not a model: it has no config.json",
            where=f"model.path {folder}",
            fix="Give the folder that holds config.json, *.safetensors and the tokenizer",
        )
    shards = _shards(folder)
    if not shards:
        raise ConfigError(
            "has no *.safetensors file",
            where=f"model.path {folder}",
            fix="Save the model with safe serialization",
        )
    tensors: dict[str, bytes] = {}
    for shard in shards:
        tensors |= _tensor_prints(shard)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name])
    return digest.hexdigest()


def _shards(folder: Path) -> list[Path]:
    """The files that are loaded: those of the index, or the one; some folders hold more copies."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            shards = [folder / str(name) for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"is no index of weights: {type(error).__name__} {error}",
                where=str(index),
                fix="Copy the model again",
            ) from error
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ConfigError(
                f"lacks {', '.join(missing)}", where=str(folder), fix="Copy the model again"
            )
        return shards
    one = folder / "model.safetensors"
    return [one] if one.is_file() else sorted(folder.glob("*.safetensors"))


def _tensor_prints(shard: Path) -> dict[str, bytes]:
    """For each tensor of one file: dtype, shape and sample, as bytes."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > _MAX_HEADER_BYTES:
                raise ValueError("header too long")
            header = json.loads(file.read(length))
            prints = {}
            for name, facts in header.items():
                if name == "__metadata__":
                    continue
                begin, end = facts["data_offsets"]
                file.seek(8 + length + begin + max(0, (end - begin) // 2 - _SAMPLE_BYTES // 2))
                sample = file.read(min(_SAMPLE_BYTES, end - begin))
                prints[name] = f"{facts['dtype']}{facts['shape']}".encode() + sample
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"is not a safetensors file: {error}",
                where=str(shard),
                fix="Copy the model again",
            ) from error
    return prints
