"""Small LoRA adapter folders without torch: written for tests, and read as vLLM reads them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class NoAdapterError(Exception):
    """There is no adapter at the path."""


class BrokenAdapterError(Exception):
    """There is one, and it cannot be loaded."""


def safetensors(tensors: dict[str, tuple[list[int], bytes]]) -> bytes:
    """A safetensors file of float32 tensors: name -> (shape, data)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(d for _, d in tensors.values())


def write_adapter(folder: Path, *, seed: int = 0, rank: int = 8, hidden: int = 64) -> Path:
    """A LoRA of one layer, as PEFT saves it; its bytes follow from the arguments."""
    random = Random(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": ([rank, hidden], random.randbytes(4 * rank * hidden)),
        f"{prefix}.lora_B.weight": ([hidden, rank], random.randbytes(4 * rank * hidden)),
    }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes(safetensors(tensors))
    return folder


def adapter_digest(folder: Path) -> str:
    """What FakeVllm signs its answers with after loading `folder`."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def has_effect(folder: Path) -> bool:
    """Whether the adapter changes what the base model says: its second factor is not 0."""
    data = (folder / WEIGHTS).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    seconds = [row["data_offsets"] for name, row in header.items() if ".lora_B." in name]
    return any(any(data[begin + first : begin + end]) for first, end in seconds)


def silence(folder: Path) -> None:
    """Make it an adapter that changes nothing."""
    data = bytearray((folder / WEIGHTS).read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, row in json.loads(data[8:begin]).items():
        if ".lora_B." in name:
            first, end = row["data_offsets"]
            data[begin + first : begin + end] = bytes(end - first)
    (folder / WEIGHTS).write_bytes(data)


def load(folder: Path, *, max_rank: int) -> str:
    """The digest of a whole, valid adapter that fits; raises what vLLM would trip over."""
    if not (folder / CONFIG).exists():
        raise NoAdapterError(str(folder))
    try:
        rank = json.loads((folder / CONFIG).read_text())["r"]
    except (ValueError, KeyError) as error:
        raise BrokenAdapterError(str(error)) from error
    if rank > max_rank:
        raise BrokenAdapterError(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    if not (folder / WEIGHTS).exists():
        raise BrokenAdapterError("<path> doesn't contain tensors")
    _check_weights((folder / WEIGHTS).read_bytes())
    return adapter_digest(folder)


def _check_weights(data: bytes) -> None:
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > len(data) - 8:
        raise BrokenAdapterError("Error while deserializing header: invalid header length")
    try:
        header = json.loads(data[8 : 8 + header_bytes])
    except ValueError as error:
        raise BrokenAdapterError("Error while deserializing header: invalid JSON") from error
    ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    if max(ends, default=0) != len(data) - 8 - header_bytes:
        reason = "incomplete metadata, file not fully covered"
        raise BrokenAdapterError(f"Error while deserializing header: {reason}")
