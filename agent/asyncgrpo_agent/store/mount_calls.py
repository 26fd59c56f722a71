"""What the agent and the mount's worker say to each other, over two pipes.

Requests are numbered, one call each; the worker answers them in order with a `Result` or a
`Failure` of that number. Unasked it says `Alive`, so that a slow call is not taken for a hung one,
and `Changed`. Frames are 4 bytes of big-endian length, then msgpack: both ends are this program,
and the run's private key travels here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from asyncgrpo_agent.core.checkpoints import Checkpoint, CheckpointKey
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.segments import SegmentKey
from asyncgrpo_agent.errors import (
    AdapterDamagedError,
    AdapterPrunedError,
    AdapterRefusedError,
    BucketUnavailableError,
    DeletionForbiddenError,
    StoreError,
)
from asyncgrpo_agent.store.checkpoints import PublishedCheckpoint, SavedCheckpoint
from asyncgrpo_agent.store.mounts import KnownMount

_PREFIX_BYTES: Final = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Anything that is sent."""


# --- calls -----------------------------------------------------------------------------------


class Open(Message, frozen=True, kw_only=True):
    """The first call. `known` is what an earlier worker found; the result is a KnownMount."""

    run_dir: Path
    known: KnownMount | None
    log_json: bool
    log_level: str


class ListRuns(Message, frozen=True, kw_only=True):
    """The result is a list of the names of all runs in the bucket."""


class ListAttempts(Message, frozen=True, kw_only=True):
    """The result is a list of Attempt."""


class ListCommits(Message, frozen=True, kw_only=True):
    """The result is a list of keys."""

    attempt: str
    after_version: int
    whole: bool = False


class ListVersions(Message, frozen=True, kw_only=True):
    """The result is a list of versions for each attempt."""


class ListTorn(Message, frozen=True, kw_only=True):
    """The same for versions that have data and no commit."""


class Prune(Message, frozen=True, kw_only=True):
    """The result is the number of objects that were removed."""

    attempt: str
    version: int


class ReadCommit(Message, frozen=True, kw_only=True):
    """The result is a ListedCommit."""

    key: str
    run: str
    public_key: bytes | None


class ListResults(Message, frozen=True, kw_only=True):
    """The result is a list of keys."""


class ReadResult(Message, frozen=True, kw_only=True):
    """The result is a ListedCommit, of a run's result."""

    key: str
    run: str
    public_key: bytes | None


class Stage(Message, frozen=True, kw_only=True):
    """The result is a StagedAdapter."""

    commit: Commit
    staging_dir: Path
    max_rank: int


class Publish(Message, frozen=True, kw_only=True):
    """The result is a PublishedAdapter."""

    local_dir: Path
    run: str
    attempt: str
    version: int
    base_model: str
    base_model_digest: str
    private_key: bytes
    live: list[str]
    now_unix_s: float
    max_rank: int
    is_result: bool = False

    def __repr__(self) -> str:  # the key must not get into a traceback or a log
        return f"Publish(run={self.run!r}, attempt={self.attempt!r}, version={self.version})"


class Watch(Message, frozen=True, kw_only=True):
    """From now on say `Changed` when the attempt may have new commits. For local disks only. The
    result is None."""

    attempt: str


class ListCheckpoints(Message, frozen=True, kw_only=True):
    """The result is a list of CheckpointKey for each attempt."""


class ListTornCheckpoints(Message, frozen=True, kw_only=True):
    """The same for data whose step has no manifest."""


class ReadCheckpoint(Message, frozen=True, kw_only=True):
    """The result is a Checkpoint."""

    key: CheckpointKey
    run: str
    public_key: bytes


class PublishCheckpoint(Message, frozen=True, kw_only=True):
    """Begin, in place of any other. The result is a CheckpointProgress, after about `slice_s`."""

    saved: SavedCheckpoint
    slice_s: float


class ContinueCheckpoint(Message, frozen=True, kw_only=True):
    """Go on with the one that was begun, or hear its result again."""

    step: int
    slice_s: float


class RestoreCheckpoint(Message, frozen=True, kw_only=True):
    """The result is None."""

    checkpoint: Checkpoint
    target_dir: Path


class PruneCheckpoint(Message, frozen=True, kw_only=True):
    """The result is the number of objects that were removed."""

    key: CheckpointKey


class WriteSegment(Message, frozen=True, kw_only=True):
    """The result is the key that it got."""

    attempt: str
    number: int
    data: bytes

    def __repr__(self) -> str:
        return f"WriteSegment(attempt={self.attempt!r}, number={self.number})"


class ListSegments(Message, frozen=True, kw_only=True):
    """The result is a list of SegmentKey, oldest first; of another `run` if one is named."""

    run: str = ""


class ReadSegments(Message, frozen=True, kw_only=True):
    """The result is a list of bytes, of the first of the keys and one at least."""

    keys: list[SegmentKey]
    run: str = ""


class ListRecordedRuns(Message, frozen=True, kw_only=True):
    """The result is a list of the names of all runs that have a history in the bucket."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """`published` is None while it goes on."""

    published: PublishedCheckpoint | None


Call = (
    Open
    | ListRuns
    | ListAttempts
    | ListCommits
    | ListVersions
    | ListTorn
    | Prune
    | ReadCommit
    | ListResults
    | ReadResult
    | Stage
    | Publish
    | ListCheckpoints
    | ListTornCheckpoints
    | ReadCheckpoint
    | PublishCheckpoint
    | ContinueCheckpoint
    | RestoreCheckpoint
    | PruneCheckpoint
    | WriteSegment
    | ListSegments
    | ReadSegments
    | ListRecordedRuns
    | Watch
)


def shown(call: Call) -> str:
    """The call as messages name it."""
    match call:
        case ReadCommit(key=about) | ReadResult(key=about):
            pass
        case Stage(commit=commit):
            about = commit.adapter.name
        case ListCommits(attempt=about) | Watch(attempt=about):
            pass
        case Publish(version=version) | Prune(version=version):
            about = f"version {version}"
        case (
            PublishCheckpoint(saved=SavedCheckpoint(step=step))
            | ContinueCheckpoint(step=step)
            | RestoreCheckpoint(checkpoint=Checkpoint(step=step))
        ):
            about = f"step {step}"
        case ReadCheckpoint(key=key) | PruneCheckpoint(key=key):
            about = key.key
        case WriteSegment(attempt=attempt, number=number):
            about = f"{attempt} {number}"
        case ReadSegments(keys=[first, *_]):
            about = first.key
        case _:
            about = ""
    return f"{type(call).__name__} {about}".rstrip()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call, and the number that its answer will have."""

    number: int
    call: Call


# --- answers ---------------------------------------------------------------------------------


class Result(Message, frozen=True, kw_only=True):
    """The call went well."""

    number: int
    value: msgspec.Raw


class Failure(Message, frozen=True, kw_only=True):
    """The call failed: a StoreError of a `kind`, or "bug", which no caller expects."""

    number: int
    kind: str
    what: str
    where: str
    fix: str


class Alive(Message, frozen=True, kw_only=True):
    """The current call has handled so many bytes; it may be silent for `pause_s` beyond usual."""

    done_bytes: int
    pause_s: float


class Changed(Message, frozen=True, kw_only=True):
    """There may be new commits."""


Answer = Result | Failure | Alive | Changed

_KINDS: Final[dict[str, type[StoreError]]] = {
    "refused": AdapterRefusedError,
    "pruned": AdapterPrunedError,
    "damaged": AdapterDamagedError,
    "unavailable": BucketUnavailableError,
    "undeletable": DeletionForbiddenError,
    "store": StoreError,
}
_KIND_OF: Final = {kind: name for name, kind in _KINDS.items()}


def failure_of(number: int, error: Exception) -> Failure:
    """How `error` is told to the agent."""
    if isinstance(error, StoreError):
        kind, what, where, fix = _KIND_OF[type(error)], error.what, error.where, error.fix
    elif isinstance(error, OSError):
        kind, fix = "store", "Check free space and permissions"
        what, where = error.strerror or str(error), str(error.filename or "")
    else:
        kind, what, where, fix = "bug", f"{type(error).__name__}: {error}", "", ""
    return Failure(
        number=number, kind=kind, what=_plain(what), where=_plain(where), fix=_plain(fix)
    )


def error_of(failure: Failure) -> Exception:
    """The error that the worker met."""
    if failure.kind not in _KINDS:
        return RuntimeError(failure.what)
    return _KINDS[failure.kind](failure.what, where=failure.where, fix=failure.fix)


def _plain(text: str) -> str:
    """File names may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


# --- frames ----------------------------------------------------------------------------------

T = TypeVar("T")


def _encoded(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _decoded(kind: type, value: object) -> Any:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_encoded)


def result(number: int, value: object) -> Result:
    return Result(number=number, value=msgspec.Raw(_encoder.encode(value)))


def value_of(answer: Result, kind: type[T]) -> T:
    """The value of an answer to a call whose result is a `kind`."""
    return msgspec.msgpack.decode(answer.value, type=kind, dec_hook=_decoded)


def frame(message: Request | Answer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


class Frames(Generic[T]):
    """Bytes in, whole messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(self._buffer[:_PREFIX_BYTES], "big")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_PREFIX_BYTES:end])
            del self._buffer[:end]
            yield self._decoder.decode(body)


def requests() -> Frames[Request]:
    return Frames(msgspec.msgpack.Decoder(Request, dec_hook=_decoded))


def answers() -> Frames[Answer]:
    return Frames(msgspec.msgpack.Decoder(Answer, dec_hook=_decoded))
