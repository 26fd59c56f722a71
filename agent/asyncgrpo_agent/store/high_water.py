"""The highest (attempt, version) that this host ever loaded for a run; it never goes below.

A replica that restarts, or is shown an older copy of the bucket, must not serve what it had already
left behind. The file is replaced in one step and only ever grows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from asyncgrpo_agent.errors import ConfigError


class HighWater:
    """The mark of one run on this host; (0, -1) before anything was loaded. Blocking calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.value = self._read()

    def raise_to(self, attempt: int, version: int) -> None:
        """Keep the mark if it is higher already. After an OSError it is raised, but not on disk."""
        if (attempt, version) <= self.value:
            return
        self.value = (attempt, version)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(json.dumps({"attempt": attempt, "version": version}))
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave an empty mark behind
        os.replace(fresh, self._path)

    def _read(self) -> tuple[int, int]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return (0, -1)
        try:
            mark = json.loads(text)
            return int(mark["attempt"]), int(mark["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "does not parse, so it is unknown which adapters are too old",
                where=str(self._path),
                fix="Delete it if no other run of this name has ended here",
            ) from error
