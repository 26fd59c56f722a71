"""The header of a safetensors file, checked on bytes alone: no tensor is ever built here.

A file is 8 bytes of header length, a JSON header, then data. `parse_header` gives the tensors only
if the header describes exactly the file: known dtypes, positive shapes, sizes that match, data
covered without gap, overlap or rest. Also home of the strict JSON reader that adapters go through.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Final, NoReturn

from asyncgrpo_agent.errors import AdapterRefusedError

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 16 * 2**20
_MAX_DIMENSIONS: Final = 8
_MAX_ELEMENTS: Final = 2**48
_METADATA: Final = "__metadata__"
_DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(prefix: bytes, file_bytes: int) -> int:
    """How many bytes of JSON follow the first eight."""
    if len(prefix) < LENGTH_BYTES:
        raise _refused("is cut within its first 8 bytes")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise _refused(f"claims a header of {length} bytes, which it cannot hold")
    return length


def parse_header(head: bytes, file_bytes: int) -> dict[str, Tensor]:
    """The tensors by name. `head` holds at least the length and the header."""
    length = header_length(head, file_bytes)
    if len(head) < LENGTH_BYTES + length:
        raise _refused("is cut within its header")
    rows = strict_json(head[LENGTH_BYTES : LENGTH_BYTES + length], "the safetensors header")
    rows.pop(_METADATA, None)
    tensors = {name: _tensor(name, row) for name, row in rows.items()}
    _check_cover(tensors, file_bytes - LENGTH_BYTES - length)
    return tensors


def _tensor(name: str, row: object) -> Tensor:
    match row:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end], **rest} if (
            dtype in _DTYPE_BYTES and not rest
        ):
            dims = tuple(d for d in shape if type(d) is int and 0 < d <= _MAX_ELEMENTS)
            sound = len(dims) == len(shape) <= _MAX_DIMENSIONS and prod(dims) <= _MAX_ELEMENTS
            if sound and type(begin) is type(end) is int and 0 <= begin < end:
                if end - begin != prod(dims) * _DTYPE_BYTES[dtype]:
                    raise _refused(f"{name}: its data does not have the size of its shape")
                return Tensor(dtype, dims, begin, end)
    raise _refused(f"{name}: dtype, shape or offsets make no sense")


def _check_cover(tensors: dict[str, Tensor], data_bytes: int) -> None:
    covered = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin != covered:
            raise _refused(f"{name}: its data overlaps another tensor or leaves a gap")
        covered = tensor.end
    if covered != data_bytes:
        raise _refused(f"holds {data_bytes} bytes of data where its header describes {covered}")


def _refused(what: str) -> AdapterRefusedError:
    return AdapterRefusedError(what, where="safetensors", fix="Save the adapter again")


# --- strict JSON -----------------------------------------------------------------------------


def strict_json(data: bytes, what: str) -> dict[str, object]:
    """A JSON object without repeated keys, NaN or deep nesting; AdapterRefusedError otherwise."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_such_number)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{what} is not sound JSON: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise _refused(f"{what} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_such_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
