import hashlib
from typing import Any

import msgspec
import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core.adapters import adapter_folder
from asyncgrpo_agent.core.commits import Commit, CommitFile, decode, encode, is_sealed
from asyncgrpo_agent.core.lora import LoraFacts
from asyncgrpo_agent.errors import AdapterRefusedError

KEY = bytes(range(32))
PUBLIC = Ed25519PrivateKey.from_private_bytes(KEY).public_key().public_bytes_raw()
ATTEMPT = "a0003-7f3c"
FOLDER = "adapters/a0003-7f3c/v000007"


def file(name: str, **changes: Any) -> CommitFile:
    row = {"name": name, "size_bytes": 10, "sha256": "ab" * 32, "key": f"{FOLDER}/{name}"}
    return msgspec.convert(row | changes, CommitFile)


def commit(**changes: Any) -> Commit:
    fields: dict[str, Any] = {
        "run": "run",
        "attempt": ATTEMPT,
        "version": 7,
        "base_model": "org/model",
        "base_model_digest": "cd" * 32,
        "created_unix_s": 1.7e9,
        "live": [f"run.{ATTEMPT}.v000006.0123456789ab"],
        "lora": LoraFacts(
            r=8, rank_pattern={"q.proj": 8}, alpha=16.0, target_modules=["q"], tensor_count=2
        ),
        "files": [file("adapter_config.json"), file("adapter_model.safetensors")],
    }
    return Commit(**(fields | changes))


def sealed_unchecked(row: dict[str, Any], key: bytes = KEY) -> bytes:
    """A commit with any content under a true signature: what a buggy or newer trainer writes."""
    body = tomli_w.dumps(row).encode()
    signature = Ed25519PrivateKey.from_private_bytes(key).sign(b"asyncgrpo commit\n" + body)
    digest = hashlib.sha256(body).hexdigest()
    seal = f'\n[seal]\ndigest = "{digest}"\nsignature = "{signature.hex()}"\n'
    return body + seal.encode()


SEALED = encode(commit(), KEY)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(
    version=st.integers(0, 999_999_999),
    retry=st.integers(0, 3),
    base_model=texts,
    pattern=st.dictionaries(texts, st.integers(1, 512), max_size=4),
    modules=st.lists(texts, max_size=4),
    created_unix_s=st.floats(allow_nan=False, allow_infinity=False),
)
def test_round_trip(
    version: int,
    retry: int,
    base_model: str,
    pattern: dict[str, int],
    modules: list[str],
    created_unix_s: float,
) -> None:
    folder = adapter_folder(ATTEMPT, version, retry)
    one = commit(
        version=version,
        base_model=base_model,
        created_unix_s=created_unix_s,
        lora=LoraFacts(
            r=8, rank_pattern=pattern, alpha=0.5, target_modules=modules, tensor_count=4
        ),
        files=[
            file(name, key=f"{folder}/{name}")
            for name in ("adapter_config.json", "adapter_model.safetensors")
        ],
    )
    assert decode(encode(one, KEY), run="run", public_key=PUBLIC) == one


@given(st.integers(0, len(SEALED) - 1))
def test_any_cut_is_refused(length: int) -> None:
    with pytest.raises(AdapterRefusedError):
        decode(SEALED[:length], run="run", public_key=PUBLIC)
    assert not is_sealed(SEALED[:length])


@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(SEALED)
    data[position] ^= flip
    with pytest.raises(AdapterRefusedError):
        decode(bytes(data), run="run", public_key=PUBLIC)


@given(st.binary(min_size=1, max_size=400))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, data + SEALED, SEALED + data):
        with pytest.raises(AdapterRefusedError):
            decode(candidate, run="run", public_key=PUBLIC)


def test_other_runs_and_other_keys_are_refused() -> None:
    with pytest.raises(AdapterRefusedError, match="belongs to run 'run', not 'other'"):
        decode(SEALED, run="other", public_key=PUBLIC)
    forged = encode(commit(), b"x" * 32)
    with pytest.raises(AdapterRefusedError, match="not signed with the run's key"):
        decode(forged, run="run", public_key=PUBLIC)


def test_a_newer_format_says_what_to_do() -> None:
    row = msgspec.to_builtins(commit()) | {"format": 2, "new": True}
    with pytest.raises(AdapterRefusedError, match=r"format 2.*Update this agent"):
        decode(sealed_unchecked(row), run="run", public_key=PUBLIC)


def files_row(**changes: Any) -> dict[str, Any]:
    rows = msgspec.to_builtins([file("adapter_config.json"), file("adapter_model.safetensors")])
    return {"files": [rows[0], rows[1] | changes]}


@pytest.mark.parametrize(
    "change",
    [
        files_row(key="/etc/adapter_model.safetensors"),
        files_row(key=f"{FOLDER}/../v000007/adapter_model.safetensors"),
        files_row(key=f"{FOLDER}-r1/adapter_model.safetensors"),
        files_row(key="adapters/a0003-7f3c/v000008/adapter_model.safetensors"),
        files_row(name="adapter_model.bin", key=f"{FOLDER}/adapter_model.bin"),
        files_row(name="adapter_config.json", key=f"{FOLDER}/adapter_config.json"),
        files_row(size_bytes=0),
        files_row(size_bytes=2**40),
        files_row(size_bytes=1.5),
        files_row(sha256="AB" * 32),
        files_row(mode="0777"),
        {"files": []},
        {"live": ["other.a0001-0000.v000001.0123456789ab"]},
        {"live": ["base-model"]},
        {"attempt": "latest"},
        {"version": -1},
        {"version": True},
        {"created_unix_s": float("nan")},
        {"surplus": 1},
        {"lora": {}},
    ],
)
def test_signed_nonsense_is_refused(change: dict[str, Any]) -> None:
    row = msgspec.to_builtins(commit()) | change
    with pytest.raises(AdapterRefusedError):
        decode(sealed_unchecked(row), run="run", public_key=PUBLIC)


def test_what_no_reader_takes_is_not_encoded() -> None:
    with pytest.raises(AdapterRefusedError, match="outside its own folder"):
        encode(commit(version=8), KEY)
    with pytest.raises(AdapterRefusedError, match="not Unicode"):
        encode(commit(base_model="\ud800"), KEY)


def test_the_identity_follows_from_the_files() -> None:
    one, other = commit(), commit(live=[])
    assert one.adapter == other.adapter
    assert one.total_bytes == 20
    assert one.adapter.name.startswith("run.a0003-7f3c.v000007.")
