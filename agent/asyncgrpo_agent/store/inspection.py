"""Looks at an adapter's files on local disk: sizes, hashes, header, LoRA facts. Never writes.

Both ends use it: the trainer before it publishes, the replica on what it staged. Memory is bounded
by one chunk and one safetensors header, whatever the files claim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Final

from asyncgrpo_agent.core.adapters import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE
from asyncgrpo_agent.core.commits import MAX_FILE_BYTES
from asyncgrpo_agent.core.lora import LoraFacts, check_adapter
from asyncgrpo_agent.core.safetensors import LENGTH_BYTES, header_length, parse_header
from asyncgrpo_agent.errors import AdapterRefusedError
from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat

CHUNK_BYTES: Final = 1 << 20
_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedFile:
    """What one file was when it was read."""

    name: str
    size_bytes: int
    sha256: str


def chunks(file: RawIOBase | BinaryIO, heartbeat: Heartbeat) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        heartbeat.beat(len(chunk))
        yield chunk


def inspect_files(folder: Path, heartbeat: Heartbeat = SILENT) -> list[InspectedFile]:
    """Both files of an adapter. AdapterRefusedError when one is missing, empty or too large."""
    return [_inspect(folder, name, heartbeat) for name in ADAPTER_FILES]


def inspect_lora(folder: Path, *, max_rank: int) -> LoraFacts:
    """The facts of a LoRA that vLLM will take, or AdapterRefusedError that names the file."""
    try:
        config_json = _read_config(folder / CONFIG_FILE)
        path = folder / WEIGHTS_FILE
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            head = prefix + file.read(header_length(prefix, file_bytes))
        return check_adapter(config_json, parse_header(head, file_bytes), max_rank=max_rank)
    except AdapterRefusedError as error:
        error.where = f"{folder} ({error.where})" if error.where else str(folder)
        raise


def _read_config(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES[CONFIG_FILE])


def _inspect(folder: Path, name: str, heartbeat: Heartbeat) -> InspectedFile:
    path = folder / name
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with path.open("rb") as file:
            for chunk in chunks(file, heartbeat):
                digest.update(chunk)
                size_bytes += len(chunk)
    except FileNotFoundError as error:
        raise _missing(folder, name) from error
    if not 0 < size_bytes <= MAX_FILE_BYTES[name]:
        raise AdapterRefusedError(
            f"has {size_bytes} bytes", where=str(path), fix=f"At most {MAX_FILE_BYTES[name]} fit"
        )
    return InspectedFile(name=name, size_bytes=size_bytes, sha256=digest.hexdigest())


def _missing(folder: Path, name: str) -> AdapterRefusedError:
    pickled = name == WEIGHTS_FILE and any((folder / pickle).exists() for pickle in _PICKLES)
    return AdapterRefusedError(
        "holds pickled weights only" if pickled else f"has no {name}",
        where=str(folder),
        fix="Save with save_pretrained(safe_serialization=True)",
    )
