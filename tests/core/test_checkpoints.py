"""Checkpoints: keys, sealed manifests, retention."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncgrpo_agent.core import commits
from asyncgrpo_agent.core.checkpoints import (
    Checkpoint,
    CheckpointFile,
    CheckpointKey,
    checkpoint_folder,
    checkpoint_key,
    decode,
    encode,
    is_safe_name,
    parse_folder_name,
    parse_manifest_name,
    plan_checkpoint_prune,
)
from asyncgrpo_agent.errors import AdapterRefusedError
from fakes.bucket import ATTEMPT, PRIVATE_KEY, PUBLIC_KEY

FILE = CheckpointFile(name="optimizer.pt", size_bytes=3, sha256="a" * 64)
CHECKPOINT = Checkpoint(
    run="run",
    attempt=ATTEMPT,
    step=400,
    base_model="base",
    base_model_digest="ab" * 32,
    created_unix_s=1.7e9,
    folder=checkpoint_folder(ATTEMPT, 400),
    files=[FILE, CheckpointFile(name="sub/rng.pth", size_bytes=0, sha256="b" * 64)],
)


def changed(**fields: object) -> Checkpoint:
    return msgspec.structs.replace(CHECKPOINT, **fields)


def read(data: bytes, run: str = "run") -> Checkpoint:
    return decode(data, run=run, public_key=PUBLIC_KEY)


def test_a_manifest_reads_back() -> None:
    assert read(encode(CHECKPOINT, PRIVATE_KEY)) == CHECKPOINT
    assert CHECKPOINT.total_bytes == 3


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"run": "Other run"}, "belongs to run"),
        ({"attempt": "latest"}, "format or attempt"),
        ({"step": -1}, "step or time"),
        ({"created_unix_s": float("nan")}, "step or time"),
        ({"folder": "checkpoints/a0001-7f3c/s000399"}, "outside its own folder"),
        ({"folder": "../s000400"}, "outside its own folder"),
        ({"files": []}, "names 0 files"),
        ({"files": [FILE, FILE]}, "twice"),
        ({"files": [msgspec.structs.replace(FILE, name="../../etc/passwd")]}, "names a file"),
        ({"files": [msgspec.structs.replace(FILE, name="/etc/passwd")]}, "names a file"),
        ({"files": [msgspec.structs.replace(FILE, size_bytes=-1)]}, "bytes"),
        ({"files": [msgspec.structs.replace(FILE, sha256="")]}, "sha256"),
    ],
)
def test_what_no_reader_would_take_is_never_written(fields: dict[str, object], why: str) -> None:
    with pytest.raises(AdapterRefusedError, match=why):
        encode(changed(**fields), PRIVATE_KEY)


def test_another_runs_manifest_is_refused() -> None:
    with pytest.raises(AdapterRefusedError, match="belongs to run"):
        read(encode(CHECKPOINT, PRIVATE_KEY), run="other")


def test_another_key_is_refused() -> None:
    with pytest.raises(AdapterRefusedError, match="not signed"):
        read(encode(CHECKPOINT, bytes(32)))


def test_an_adapters_commit_is_no_checkpoint_even_with_a_true_signature() -> None:
    with pytest.raises(AdapterRefusedError):
        commits.decode(encode(CHECKPOINT, PRIVATE_KEY), run="run", public_key=PUBLIC_KEY)


@given(data=st.data())
def test_any_change_of_a_byte_is_refused(data: st.DataObject) -> None:
    sealed = bytearray(encode(CHECKPOINT, PRIVATE_KEY))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(AdapterRefusedError):
        read(bytes(sealed))


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "a//b", "/a", "a/", "a\\b", "a\0"])
def test_names_that_could_leave_the_folder(name: str) -> None:
    assert not is_safe_name(name)


def test_keys_read_back() -> None:
    assert checkpoint_key(ATTEMPT, 400, 2) == "checkpoints/a0001-7f3c/s000400-r2.toml"
    found = parse_manifest_name(ATTEMPT, "s000400-r2.toml")
    assert found is not None
    assert (found.step, found.retry) == (400, 2)
    assert found.key == checkpoint_key(ATTEMPT, 400, 2)
    assert parse_folder_name(ATTEMPT, "s000400-r2") == found
    assert parse_manifest_name(ATTEMPT, "s000400") is None
    assert parse_folder_name(ATTEMPT, "s000400.toml") is None


def listed(**attempts: list[int]) -> dict[str, list[CheckpointKey]]:
    rows = {name.replace("_", "-"): steps for name, steps in attempts.items()}
    return {
        name: [CheckpointKey(int(name[1:5]), step, 0, name) for step in steps]
        for name, steps in rows.items()
    }


def test_the_newest_stay() -> None:
    found = plan_checkpoint_prune(
        "a0002-bbbb", listed(a0001_aaaa=[5, 10], a0002_bbbb=[15]), {}, keep=2
    )
    assert [(key.attempt, key.step) for key in found] == [("a0001-aaaa", 5)]


def test_later_attempts_are_not_ours_to_judge() -> None:
    rows = listed(a0003_cccc=[1, 2, 3], a0002_ffff=[1, 2], a0002_bbbb=[4])
    assert plan_checkpoint_prune("a0002-bbbb", rows, rows | {"a0002-bbbb": []}, keep=1) == []


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_one_always_stays(keep: int) -> None:
    assert [
        k.step
        for k in plan_checkpoint_prune("a0001-aaaa", listed(a0001_aaaa=[1, 2]), {}, keep=keep)
    ] == [1]


def test_data_without_a_manifest_goes_once_a_newer_one_is_whole() -> None:
    torn = listed(a0001_aaaa=[7], a0002_bbbb=[3, 9], a0003_cccc=[1])
    plan = plan_checkpoint_prune("a0002-bbbb", listed(a0002_bbbb=[5]), torn, keep=2)
    assert [(key.attempt, key.step) for key in plan] == [("a0001-aaaa", 7), ("a0002-bbbb", 3)]
    assert plan_checkpoint_prune("a0002-bbbb", {}, torn, keep=2) == []


def test_steps_are_kept_not_manifests() -> None:
    twice = [CheckpointKey(1, step, retry, "a0001-aaaa") for step in (1, 2) for retry in (0, 1)]
    plan = plan_checkpoint_prune("a0001-aaaa", {"a0001-aaaa": twice}, {}, keep=1)
    assert plan == twice[:2]
    assert plan_checkpoint_prune("a0001-aaaa", {"a0001-aaaa": twice}, {}, keep=2) == []
