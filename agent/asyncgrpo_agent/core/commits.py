"""The commit: the signed manifest that makes an adapter exist.

On disk it is TOML under a seal, see `core.seals`. A commit names only its own adapter's two files,
in one folder of its own attempt and version. The commit of a run's result says the same, of the
step in place of the version, and lies on a shelf of its own: no signature there fits a version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Final

import msgspec

from asyncgrpo_agent.core import seals
from asyncgrpo_agent.core.adapters import (
    ADAPTER_FILES,
    CONFIG_FILE,
    MAX_RETRIES,
    WEIGHTS_FILE,
    AdapterId,
    CommitKey,
    adapter_digest,
    adapter_folder,
    commit_key,
    is_attempt,
    is_run_name,
    parse_commit_key,
    parse_name,
)
from asyncgrpo_agent.core.finals import final_folder, final_key, parse_final_key
from asyncgrpo_agent.core.lora import LoraFacts
from asyncgrpo_agent.core.seals import MAX_SEALED_BYTES, REPUBLISH, refused
from asyncgrpo_agent.core.seals import is_sealed as is_sealed

FORMAT: Final = 1
MAX_COMMIT_BYTES: Final = MAX_SEALED_BYTES
MAX_FILE_BYTES: Final = {CONFIG_FILE: 1 * 2**20, WEIGHTS_FILE: 16 * 2**30}
_MAX_VERSION: Final = 999_999_999
_MAX_LIVE: Final = 256

_SHA256_RE: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where commits of one kind lie, and what is signed with each."""

    context: bytes
    folder: Callable[[str, int, int], str]
    key: Callable[[str, int, int], str]
    parse: Callable[[str], CommitKey | None]


VERSIONS: Final = Shelf(
    context=b"asyncgrpo commit\n", folder=adapter_folder, key=commit_key, parse=parse_commit_key
)
RESULTS: Final = Shelf(
    context=b"asyncgrpo final\n", folder=final_folder, key=final_key, parse=parse_final_key
)


class CommitFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the adapter; `key` is its path below the run's folder."""

    name: str
    size_bytes: int
    sha256: str
    key: str


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer published. `live` holds the physical names that the run wanted just before."""

    format: int = FORMAT
    run: str
    attempt: str
    version: int
    base_model: str
    base_model_digest: str
    created_unix_s: float
    live: list[str]
    lora: LoraFacts
    files: list[CommitFile]

    @property
    def adapter(self) -> AdapterId:
        digest = adapter_digest({file.name: file.sha256 for file in self.files})
        return AdapterId(run=self.run, attempt=self.attempt, version=self.version, digest=digest)

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def encode(commit: Commit, private_key: bytes, *, shelf: Shelf = VERSIONS) -> bytes:
    """The sealed bytes. Raises AdapterRefusedError for a commit that no reader would take."""
    _check(commit, commit.run, shelf)
    return seals.seal(commit, private_key, context=shelf.context)


def decode(data: bytes, *, run: str, public_key: bytes | None, shelf: Shelf = VERSIONS) -> Commit:
    """The commit, or AdapterRefusedError: cut, forged, foreign, newer, or pointing elsewhere.

    Without a key the signature is not checked, as `seals.unseal` says.
    """
    commit = seals.unseal(
        data, Commit, public_key=public_key, context=shelf.context, newest_format=FORMAT
    )
    _check(commit, run, shelf)
    return commit


def _check(commit: Commit, run: str, shelf: Shelf) -> None:
    if not is_run_name(commit.run) or commit.run != run:
        raise refused(f"belongs to run {commit.run!r}, not {run!r}", "Give each run its own key")
    if commit.format != FORMAT or not is_attempt(commit.attempt):
        raise refused("names an impossible format or attempt", REPUBLISH)
    if not 0 <= commit.version <= _MAX_VERSION or not isfinite(commit.created_unix_s):
        raise refused("names an impossible version or time", REPUBLISH)
    _check_live(commit)
    _check_files(commit, shelf)


def _check_live(commit: Commit) -> None:
    names = [parse_name(name) for name in commit.live[: _MAX_LIVE + 1]]
    if len(names) > _MAX_LIVE or any(n is None or n.run != commit.run for n in names):
        raise refused("its live names are too many or not of this run", REPUBLISH)


def _check_files(commit: Commit, shelf: Shelf) -> None:
    if tuple(sorted(file.name for file in commit.files)) != ADAPTER_FILES:
        raise refused(f"must name exactly {' and '.join(ADAPTER_FILES)}", REPUBLISH)
    folders = [
        shelf.folder(commit.attempt, commit.version, retry) for retry in range(MAX_RETRIES + 1)
    ]
    if not any(all(f.key == f"{folder}/{f.name}" for f in commit.files) for folder in folders):
        raise refused("points to files outside its own folder", REPUBLISH)
    for file in commit.files:
        if not 0 < file.size_bytes <= MAX_FILE_BYTES[file.name]:
            raise refused(f"{file.name} has {file.size_bytes} bytes", "Train a smaller adapter")
        if _SHA256_RE.fullmatch(file.sha256) is None:
            raise refused(f"the sha256 of {file.name} is none", REPUBLISH)
