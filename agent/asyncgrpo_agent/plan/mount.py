"""What a host's mount asks of S3 for what the agent does there, and how long that takes.

Counted as Mountpoint for Amazon S3 does it: each part of a path that was not seen a moment ago is a
HEAD and a LIST, sent together; an open asks again, whatever was seen; a listing is a LIST for 1000
names; a file is read in ranges; a new file is a multipart upload. The sequences of calls are those
of `store.bucket`, `store.listing` and `store.staging`; a test compares the counts with those of the
real code on a file system that behaves as Mountpoint does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Final

from asyncgrpo_agent.core.adapters import (
    COMMITS_PER_FOLDER,
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_folder,
    commit_folder,
    commit_key,
)
from asyncgrpo_agent.plan.inputs import MB, Bucket
from asyncgrpo_agent.plan.timeline import Process, Timeline

ATTEMPT: Final = "a0001-0000"
CONFIG_BYTES: Final = 1000
COMMIT_BYTES: Final = 2000
FIRST_READ_BYTES: Final = 1_179_648  # of the first range of a file
PART_BYTES: Final = 8 << 20  # of the others, and of an upload
FILE_TTL_S: Final = 0.1  # for so long the kernel believes what it has seen of a file ...
FOLDER_TTL_S: Final = 1.0  # ... and of a folder
LATENCY_SPREAD: Final = 0.5  # sigma of the logarithm
_LIVE_FOLDERS: Final = 2  # that are listed at most
_MOST_KNOWN: Final = 4096
_WHILE_WRITING_S: Final = 60.0


@dataclass(slots=True)
class Requests:
    """Of one host or of all."""

    head: int = 0
    list: int = 0
    get: int = 0
    put: int = 0
    read_bytes: int = 0

    def add(self, other: Requests) -> None:
        self.head += other.head
        self.list += other.list
        self.get += other.get
        self.put += other.put
        self.read_bytes += other.read_bytes

    @property
    def total(self) -> int:
        return self.head + self.list + self.get + self.put


@dataclass(slots=True)
class S3:
    """The one bucket behind all mounts: latencies, and a limit to what it answers."""

    bucket: Bucket
    timeline: Timeline
    rng: Random
    asked: Requests = field(default_factory=Requests)
    queued_s: float = 0.0  # that requests have waited for the limit, in all
    _free_at: float = 0.0

    def answer_s(self, requests: int) -> float:
        """Until so many, sent together, have their first bytes."""
        now = self.timeline.now
        begin = max(now, self._free_at)
        self._free_at = begin + requests / self.bucket.requests_per_s
        self.queued_s += (begin - now) * requests
        return begin - now + self.rng.lognormvariate(0.0, LATENCY_SPREAD) * self.bucket.latency_s


@dataclass(slots=True)
class Mount:
    """One host's. `run` is the name of the run's folder."""

    s3: S3
    mb_per_s: float
    file_ttl_s: float = FILE_TTL_S
    folder_ttl_s: float = FOLDER_TTL_S
    run: str = "plan"
    asked: Requests = field(default_factory=Requests)
    _seen: dict[str, float] = field(default_factory=dict)  # path -> until when it is believed
    _listed: dict[str, float] = field(default_factory=dict)  # folder -> the same of all within
    _shown: set[str] = field(default_factory=set)  # as `store.listing` remembers it

    # --- what the agent does -----------------------------------------------------------------

    def list_commits(self, oldest: int, newest: int) -> Process:
        """Of the attempt, where what is looked for begins at version `oldest`."""
        yield from self._names(f"commits/{ATTEMPT}")
        folders = range(newest // COMMITS_PER_FOLDER, oldest // COMMITS_PER_FOLDER - 1, -1)
        for number in folders[:_LIVE_FOLDERS]:
            yield from self._names(commit_folder(ATTEMPT, number * COMMITS_PER_FOLDER))

    def read_commit(self, version: int) -> Process:
        yield from self._read(commit_key(ATTEMPT, version), COMMIT_BYTES)

    def read_adapter(self, version: int, size_bytes: int) -> Process:
        """As `staging.stage` reads its two files."""
        folder = adapter_folder(ATTEMPT, version)
        yield from self._names(folder)
        yield from self._read(f"{folder}/{CONFIG_FILE}", CONFIG_BYTES)
        yield from self._read(f"{folder}/{WEIGHTS_FILE}", size_bytes)

    def publish(self, version: int, size_bytes: int) -> Process:
        """As `bucket.publish`, without the check before."""
        yield from self._scan("")
        folder = adapter_folder(ATTEMPT, version)
        yield from self._make_folder(folder)
        yield from self._write(f"{folder}/{CONFIG_FILE}", CONFIG_BYTES)
        yield from self._write(f"{folder}/{WEIGHTS_FILE}", size_bytes)
        yield from self._write(commit_key(ATTEMPT, version), COMMIT_BYTES)

    def write_segment(self, number: int, size_bytes: int) -> Process:
        """Of the run's history."""
        yield from self._write(f"events/{ATTEMPT}/{number:06d}.jsonl", size_bytes)

    # --- calls -------------------------------------------------------------------------------

    def _names(self, folder: str) -> Process:
        """A folder is listed only after its parent's listing has shown it; see `store.listing`."""
        path = f"{self.run}/{folder}".rstrip("/")
        if path not in self._shown:
            parent = folder.rpartition("/")[0]
            yield from self._names(parent) if folder else self._scan("")
            self._shown.add(path)
        yield from self._scan(path)

    def _scan(self, path: str) -> Process:
        """One page: what can no longer be asked for is removed, and folders hold 500 commits."""
        yield from self._walk(path)
        yield from self._ask(Requests(list=1))
        self._keep(self._listed, path, self.file_ttl_s)

    def _read(self, key: str, size_bytes: int) -> Process:
        yield from self._walk(f"{self.run}/{key}")
        yield from self._ask(Requests(head=1, list=1))
        more = max(0, size_bytes - FIRST_READ_BYTES)
        found = Requests(get=1 + math.ceil(more / PART_BYTES), read_bytes=size_bytes)
        yield from self._ask(found)
        yield size_bytes / (self.mb_per_s * MB)

    def _write(self, key: str, size_bytes: int) -> Process:
        path = f"{self.run}/{key}"
        yield from self._walk(path)  # it is not there ...
        yield from self._ask(Requests(head=1, list=1))  # ... nor when it is made
        self._forget(path)
        yield from self._ask(Requests(put=1))  # the upload begins
        yield size_bytes / (self.mb_per_s * MB)
        yield from self._ask(Requests(put=1 + max(1, math.ceil(size_bytes / PART_BYTES))))

    def _make_folder(self, folder: str) -> Process:
        path = f"{self.run}/{folder}"
        yield from self._walk(path)
        yield from self._ask(Requests(head=1, list=1))
        self._forget(path)
        self._keep(self._seen, path, _WHILE_WRITING_S)  # this mount's own until it has a file

    def _walk(self, path: str) -> Process:
        """Look up each part of a path that is not believed any more."""
        at, whole = "", path.split("/") if path else []
        for part in whole:
            parent, at = at, f"{at}/{part}" if at else part
            now = self.s3.timeline.now
            if max(self._seen.get(at, 0.0), self._listed.get(parent, 0.0)) <= now:
                yield from self._ask(Requests(head=1, list=1))
                self._keep(self._seen, at, self.folder_ttl_s)

    def _keep(self, known: dict[str, float], path: str, ttl_s: float) -> None:
        if len(known) > _MOST_KNOWN:
            known.clear()
        known[path] = self.s3.timeline.now + ttl_s

    def _forget(self, path: str) -> None:
        self._seen.pop(path, None)
        self._listed.pop(path.rpartition("/")[0], None)

    def _ask(self, requests: Requests) -> Process:
        self.asked.add(requests)
        self.s3.asked.add(requests)
        yield self.s3.answer_s(requests.total)
