import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.safetensors import Tensor, parse_header, strict_json
from asyncgrpo_agent.errors import AdapterRefusedError
from fakes.adapters import safetensors

GOOD = safetensors({"a": ([2, 3], bytes(24)), "b": ([4], bytes(16))})


def with_header(header: object, data_bytes: int = 8) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def row(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def test_a_sound_header_gives_its_tensors() -> None:
    assert parse_header(GOOD, len(GOOD)) == {
        "a": Tensor("F32", (2, 3), 0, 24),
        "b": Tensor("F32", (4,), 24, 40),
    }


@given(st.integers(0, len(GOOD) - 1))
def test_a_cut_file_is_refused(length: int) -> None:
    with pytest.raises(AdapterRefusedError):
        parse_header(GOOD[:length], length)


@given(st.binary(max_size=300))
def test_any_bytes_give_tensors_or_a_refusal(data: bytes) -> None:
    for candidate in (data, len(data).to_bytes(8, "little") + data):
        with contextlib.suppress(AdapterRefusedError):
            parse_header(candidate, len(candidate))


@pytest.mark.parametrize(
    "header",
    [
        {"a": row(dtype="F33")},
        {"a": row(shape=[-2])},
        {"a": row(shape=[0])},
        {"a": row(shape=[2.0])},
        {"a": row(shape=[True, 2])},
        {"a": row(shape="2")},
        {"a": row(shape=[1] * 8 + [2])},
        {"a": row(shape=[2**47, 2**47])},
        {"a": row(shape=[3])},
        {"a": row(data_offsets=[0, 4])},
        {"a": row(data_offsets=[8, 0])},
        {"a": row(data_offsets=[0, 8, 8])},
        {"a": row(data_offsets=[-8, 0])},
        {"a": row(data_offsets=[4, 12])},
        {"a": row(), "b": row()},
        {"a": row(shape=[1], data_offsets=[0, 4])},
        {"a": row(extra=1)},
        {"a": {"dtype": "F32"}},
        {"a": []},
        {},
        [],
    ],
)
def test_nonsense_is_refused(header: object) -> None:
    data = with_header(header)
    with pytest.raises(AdapterRefusedError):
        parse_header(data, len(data))


def test_absurd_lengths_are_refused_before_anything_is_read() -> None:
    huge = (2**63).to_bytes(8, "little")
    with pytest.raises(AdapterRefusedError, match="claims a header"):
        parse_header(huge, 2**40)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "1", "\xff", '{"a": ' + "9" * 5000]
)
def test_json_is_strict(text: str) -> None:
    with pytest.raises(AdapterRefusedError):
        strict_json(text.encode("latin-1"), "it")
