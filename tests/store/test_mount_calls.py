from pathlib import Path

import pytest

from asyncgrpo_agent.core.checkpoints import CheckpointKey
from asyncgrpo_agent.core.segments import SegmentKey
from asyncgrpo_agent.errors import (
    AdapterRefusedError,
    BucketUnavailableError,
    DeletionForbiddenError,
    StoreError,
)
from asyncgrpo_agent.store import mount_calls as calls
from asyncgrpo_agent.store.checkpoints import SavedCheckpoint
from asyncgrpo_agent.store.mounts import KnownMount, Mount
from asyncgrpo_agent.store.staging import StagedAdapter
from fakes.bucket import PRIVATE_KEY, FakeTrainer

KINDS = (AdapterRefusedError, BucketUnavailableError, DeletionForbiddenError, StoreError)
MOUNT = Mount(mount_id=7, mount_point="/mnt", fs_type="fuse", source="s3", read_only=True)
PUBLISH = calls.Publish(
    local_dir=Path("/tmp/v1"),
    run="run",
    attempt="a0001-7f3c",
    version=1,
    base_model="base",
    base_model_digest="ab" * 32,
    private_key=PRIVATE_KEY,
    live=["one"],
    now_unix_s=1.5,
    max_rank=8,
)

PUBLISH_CHECKPOINT = calls.PublishCheckpoint(
    saved=SavedCheckpoint(
        local_dir=Path("/tmp/checkpoint-400"),
        run="run",
        attempt="a0001-7f3c",
        step=400,
        base_model="base",
        base_model_digest="ab" * 32,
        private_key=PRIVATE_KEY,
        now_unix_s=1.5,
    ),
    slice_s=0.5,
)


@pytest.mark.parametrize(
    "call",
    [
        calls.Open(
            run_dir=Path("/mnt/run"),
            known=KnownMount(path="/mnt", mount=MOUNT),
            log_json=False,
            log_level="INFO",
        ),
        calls.ListAttempts(),
        calls.ListVersions(),
        PUBLISH,
        PUBLISH_CHECKPOINT,
        calls.PruneCheckpoint(key=CheckpointKey(1, 400, 0, "a0001-7f3c")),
        calls.WriteSegment(attempt="a0001-7f3c", number=7, data=b"x"),
        calls.ReadSegments(keys=[SegmentKey(1, "a0001-7f3c", 7, 0)]),
    ],
)
def test_a_call_arrives_as_it_was_sent_in_whatever_pieces(call: calls.Call) -> None:
    request = calls.Request(number=1, call=call)
    frames, data = calls.requests(), 2 * calls.frame(request)
    found = [got for at in range(len(data)) for got in frames.feed(data[at : at + 1])]
    assert found == [request, request]


def test_a_commit_arrives_as_it_was_sent(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    trainer = FakeTrainer(tmp_path / "local", tmp_path / "bucket" / "run")
    listed = trainer.read(trainer.publish(3).commit_key)
    result = calls.result(1, listed)
    (answer,) = calls.answers().feed(calls.frame(result))
    assert isinstance(answer, calls.Result)
    assert calls.value_of(answer, type(listed)) == listed
    assert calls.shown(
        calls.Stage(commit=listed.commit, staging_dir=tmp_path, max_rank=8)
    ) == "Stage " + (listed.adapter.name)


def test_a_path_in_a_result_is_a_path() -> None:
    staged = StagedAdapter(path=Path("/x"), digest="ab", total_bytes=3, phases_s={"read": 0.5})
    assert calls.value_of(calls.result(1, staged), StagedAdapter) == staged


@pytest.mark.parametrize("kind", KINDS)
def test_errors_arrive_as_they_were_raised(kind: type[StoreError]) -> None:
    error = kind("is cut", where="/mnt/a", fix="Wait")
    (answer,) = calls.answers().feed(calls.frame(calls.failure_of(2, error)))
    assert isinstance(answer, calls.Failure)
    again = calls.error_of(answer)
    assert type(again) is kind
    assert isinstance(again, StoreError)
    assert (again.what, again.where, again.fix) == ("is cut", "/mnt/a", "Wait")


def test_other_errors_are_named() -> None:
    full = calls.error_of(calls.failure_of(1, OSError(28, "No space left", "/tmp/\udcff")))
    assert str(full).startswith("/tmp/\\udcff: No space left")
    assert type(full) is StoreError
    bug = calls.error_of(calls.failure_of(1, ValueError("'x' is not an attempt")))
    assert str(bug) == "ValueError: 'x' is not an attempt"
    assert type(bug) is RuntimeError


def test_the_private_key_is_not_shown() -> None:
    assert repr(PUBLISH) == "Publish(run='run', attempt='a0001-7f3c', version=1)"
    assert "Publish(run" in repr(calls.Request(number=1, call=PUBLISH))
    assert calls.shown(PUBLISH) == "Publish version 1"
    assert "private_key" not in repr(PUBLISH_CHECKPOINT)
    assert calls.shown(PUBLISH_CHECKPOINT) == "PublishCheckpoint step 400"
