"""A trainer's checkpoint in the bucket: its keys, its sealed manifest, and which ones may go.

Like an adapter, a checkpoint exists once its manifest does, which is written last; what was cut
short does not count. Unlike an adapter it is any folder of files, at most `MAX_FILES` of them, and
only a trainer of the same run ever reads it.

    checkpoints/a0003-7f3c/s000400.toml            the manifest
    checkpoints/a0003-7f3c/s000400/<files>         the data; a retry takes s000400-rN

Steps go on where an earlier attempt ended, so the newest checkpoint of a run is the one with the
highest step of the highest attempt that has any.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

import msgspec

from asyncgrpo_agent.core import seals
from asyncgrpo_agent.core.adapters import MAX_RETRIES, is_attempt, is_run_name, parse_attempt
from asyncgrpo_agent.core.seals import REPUBLISH, refused

FORMAT: Final = 1
MAX_FILES: Final = 2048
_MAX_STEP: Final = 999_999_999
_MAX_FILE_BYTES: Final = 1 << 40
_CONTEXT: Final = b"asyncgrpo checkpoint\n"
_SHA256_RE: Final = re.compile(r"[0-9a-f]{64}")
_STEP: Final = r"s(?P<step>\d{6}|[1-9]\d{6,8})(?:-r(?P<retry>[1-9]\d?))?"
_FOLDER_RE: Final = re.compile(_STEP, re.ASCII)
_MANIFEST_RE: Final = re.compile(rf"{_STEP}\.toml", re.ASCII)


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file; `name` is its path below the checkpoint's folder, joined with `/`."""

    name: str
    size_bytes: int
    sha256: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer saved after `step`. `folder` holds the data, below the run's folder."""

    format: int = FORMAT
    run: str
    attempt: str
    step: int
    base_model: str
    base_model_digest: str
    created_unix_s: float
    folder: str
    settings: dict[str, str] = {}
    """What it was trained with, as JSON texts; see `core.resumption`."""
    files: list[CheckpointFile]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointKey:
    """Where a manifest is; ordered from old to new."""

    attempt_number: int
    step: int
    retry: int
    attempt: str

    @property
    def key(self) -> str:
        return f"{_folder(self.attempt, self.step, self.retry)}.toml"


# --- keys ------------------------------------------------------------------------------------


def checkpoint_folder(attempt: str, step: int, retry: int = 0) -> str:
    return _folder(attempt, step, retry)


def checkpoint_key(attempt: str, step: int, retry: int = 0) -> str:
    return f"{_folder(attempt, step, retry)}.toml"


def parse_manifest_name(attempt: str, name: str) -> CheckpointKey | None:
    """The key of a manifest from its name in the attempt's folder; None for any other name."""
    match = _MANIFEST_RE.fullmatch(name)
    return None if match is None else _key(attempt, match)


def parse_folder_name(attempt: str, name: str) -> CheckpointKey | None:
    """The same for the folder with the data."""
    match = _FOLDER_RE.fullmatch(name)
    return None if match is None else _key(attempt, match)


def _key(attempt: str, match: re.Match[str]) -> CheckpointKey:
    number = parse_attempt(attempt).number
    return CheckpointKey(number, int(match["step"]), int(match["retry"] or 0), attempt)


def _folder(attempt: str, step: int, retry: int) -> str:
    suffix = f"-r{retry}" if retry else ""
    return f"checkpoints/{attempt}/s{step:06d}{suffix}"


# --- manifests -------------------------------------------------------------------------------


def encode(checkpoint: Checkpoint, private_key: bytes) -> bytes:
    """The sealed bytes. Raises AdapterRefusedError for what no reader would take."""
    _check(checkpoint, checkpoint.run)
    return seals.seal(checkpoint, private_key, context=_CONTEXT)


def decode(data: bytes, *, run: str, public_key: bytes) -> Checkpoint:
    """The manifest, or AdapterRefusedError: cut, forged, foreign, newer, or pointing elsewhere."""
    checkpoint = seals.unseal(
        data, Checkpoint, public_key=public_key, context=_CONTEXT, newest_format=FORMAT
    )
    _check(checkpoint, run)
    return checkpoint


def _check(checkpoint: Checkpoint, run: str) -> None:
    if not is_run_name(checkpoint.run) or checkpoint.run != run:
        raise refused(
            f"belongs to run {checkpoint.run!r}, not {run!r}", "Give each run its own key"
        )
    if checkpoint.format != FORMAT or not is_attempt(checkpoint.attempt):
        raise refused("names an impossible format or attempt", REPUBLISH)
    if not 0 <= checkpoint.step <= _MAX_STEP or not isfinite(checkpoint.created_unix_s):
        raise refused("names an impossible step or time", REPUBLISH)
    retries = range(MAX_RETRIES + 1)
    folders = [checkpoint_folder(checkpoint.attempt, checkpoint.step, n) for n in retries]
    if checkpoint.folder not in folders:
        raise refused("points to files outside its own folder", REPUBLISH)
    _check_files(checkpoint.files)


def _check_files(files: list[CheckpointFile]) -> None:
    if not 0 < len(files) <= MAX_FILES:
        raise refused(f"names {len(files)} files", f"Save 1 to {MAX_FILES} of them")
    if len({file.name for file in files}) != len(files):
        raise refused("names a file twice", REPUBLISH)
    for file in files:
        if not is_safe_name(file.name):
            raise refused(f"names a file {file.name!r}", "Save files below the checkpoint only")
        if not 0 <= file.size_bytes <= _MAX_FILE_BYTES:
            raise refused(f"{file.name} has {file.size_bytes} bytes", "Save less")
        if _SHA256_RE.fullmatch(file.sha256) is None:
            raise refused(f"the sha256 of {file.name} is none", REPUBLISH)


def is_safe_name(name: str) -> bool:
    """Whether `name` stays below a folder that it is joined to, on every system."""
    plain = all(part not in ("", ".", "..") for part in name.split("/"))
    return plain and "\\" not in name and "\0" not in name and len(name) < 512


# --- retention -------------------------------------------------------------------------------


def plan_checkpoint_prune(
    ours: str,
    listed: Mapping[str, Collection[CheckpointKey]],
    torn: Mapping[str, Collection[CheckpointKey]],
    *,
    keep: int,
) -> list[CheckpointKey]:
    """What may go, oldest first: all but the newest `keep` steps of our attempt and older ones.

    `torn` is data without a manifest, which nobody completes once a newer checkpoint is whole.
    Later attempts, and others of our number, are not ours to judge. Something always stays.
    """
    whole = _ours_to_judge(ours, listed)
    steps = list(dict.fromkeys((key.attempt, key.step) for key in whole))
    kept = set(steps[-max(1, keep) :])
    old = [key for key in whole if (key.attempt, key.step) not in kept]
    cut = [key for key in _ours_to_judge(ours, torn) if whole and key < whole[-1]]
    return sorted(old + cut)


def _ours_to_judge(
    ours: str, found: Mapping[str, Collection[CheckpointKey]]
) -> list[CheckpointKey]:
    number = parse_attempt(ours).number
    return sorted(
        key
        for attempt, keys in found.items()
        for key in keys
        if key.attempt_number < number or attempt == ours
    )
