"""What one mount of `fakes.strict_mount_fs` remembers of S3, and for how long it believes that."""

from __future__ import annotations

import time
from typing import Final

from fakes.strict_mount_control import Options
from fakes.strict_mount_objects import Entry

UNKNOWN: Final = Entry(is_folder=False)
ABSENT: Final = Entry(is_folder=False)  # told apart by identity


class Memory:
    """Callers hold the lock of the mount."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: dict[str, tuple[float, Entry]] = {}
        self._absent: dict[str, float] = {}

    def recall(self, key: str, *, opening: bool) -> Entry:
        """UNKNOWN: ask S3. An open always does, unless positive entries are cached as well."""
        now = time.monotonic()
        if self._absent.get(key, 0.0) > now:
            return ABSENT
        until, entry = self._known.get(key, (0.0, UNKNOWN))
        if until < now or (opening and not self._options.metadata_ttl_s):
            return UNKNOWN
        return entry

    def keep(self, key: str, entry: Entry | None) -> None:
        """A lookup or a listing has shown the entry, or a lookup has not found one."""
        now, options = time.monotonic(), self._options
        if entry is None:
            self._known.pop(key, None)
            self._absent[key] = now + options.negative_ttl_s
            return
        if options.listing_heals:
            self._absent.pop(key, None)
        self._known[key] = (now + max(options.kernel_ttl_s, options.metadata_ttl_s), entry)

    def forget(self, key: str) -> None:
        """Something was made or unmade here: neither it nor the way to it is as remembered."""
        while key:
            self._known.pop(key, None)
            self._absent.pop(key, None)
            key = key.rpartition("/")[0]
