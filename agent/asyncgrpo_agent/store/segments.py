"""Segments of a run's history in its bucket: written new, listed, read. Blocking calls for the
mount's worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncgrpo_agent.core.adapters import is_attempt, is_run_name
from asyncgrpo_agent.core.segments import (
    FOLDER,
    MAX_SEGMENT_BYTES,
    SegmentKey,
    parse_segment_name,
    segment_key,
)
from asyncgrpo_agent.store.heartbeat import SILENT, Heartbeat
from asyncgrpo_agent.store.listing import Listing
from asyncgrpo_agent.store.mounts import MountWatch, list_names, unavailable
from asyncgrpo_agent.store.objects import ObjectWriter, check_same, finished, retried

MAX_SEGMENTS: Final = 50_000  # half a year of one each LONGEST_S


def write_segment(
    listing: Listing,
    attempt: str,
    number: int,
    data: bytes,
    *,
    mount: MountWatch | None = None,
    heartbeat: Heartbeat = SILENT,
) -> str:
    """The key that it got. BucketUnavailableError: it may be there all the same."""
    if not is_attempt(attempt):
        raise ValueError(f"{attempt!r} is not an attempt")
    watch = mount or MountWatch(listing.run_dir.parent)
    mounted = watch.found()
    watch.check_alive(writable=True)
    writer = ObjectWriter(listing.run_dir, heartbeat)
    key = finished(retried(lambda retry: writer.write(segment_key(attempt, number, retry), [data])))
    check_same(mounted, watch)
    return key


def list_segments(listing: Listing) -> list[SegmentKey]:
    """Of all attempts, oldest first; of more than any run writes, the newest."""
    found = [
        key
        for attempt in listing.names(FOLDER)
        if is_attempt(attempt)
        for name in listing.names(f"{FOLDER}/{attempt}")
        if (key := parse_segment_name(attempt, name)) is not None
    ]
    return sorted(found)[-MAX_SEGMENTS:]


def read_segments(
    listing: Listing, keys: Sequence[SegmentKey], heartbeat: Heartbeat = SILENT
) -> list[bytes]:
    """Of the first of the keys, one at least, as many as MAX_SEGMENT_BYTES hold together.

    Of a longer object, which no agent writes, the beginning. Nothing of one that is being written,
    has failed on this mount, or is gone. BucketUnavailableError.
    """
    found: list[bytes] = []
    total_bytes = 0
    for key in keys:
        path = listing.run_dir / key.key
        heartbeat.beat(0)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_SEGMENT_BYTES)
        except (FileNotFoundError, PermissionError):
            data = b""
        except OSError as error:
            raise unavailable(error, path) from error
        total_bytes += len(data)
        if found and total_bytes > MAX_SEGMENT_BYTES:
            break
        found.append(data)
    return found


def list_recorded_runs(listing: Listing) -> list[str]:
    """The runs in the bucket that have a history there, by name."""
    bucket = listing.run_dir.parent
    names = sorted(name for name in list_names(bucket) if is_run_name(name))
    return [name for name in names if FOLDER in Listing(bucket / name).names("")]
