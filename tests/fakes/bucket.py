"""Publishing and reading with fixed keys, for tests that need a run in a folder as bucket."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from asyncgrpo_agent.store.bucket import (
    ListedCommit,
    PublishedAdapter,
    list_commits,
    publish,
    read_commit,
)
from asyncgrpo_agent.store.heartbeat import Heartbeat
from fakes.adapters import write_adapter

PRIVATE_KEY = bytes(range(32))
PUBLIC_KEY = Ed25519PrivateKey.from_private_bytes(PRIVATE_KEY).public_key().public_bytes_raw()
ATTEMPT = "a0001-7f3c"


@dataclass(frozen=True)
class FakeTrainer:
    """Writes small adapters below `folder` and publishes them into `run_dir`."""

    folder: Path
    run_dir: Path
    attempt: str = ATTEMPT

    def save(self, version: int, **options: Any) -> Path:
        return write_adapter(self.folder / f"v{version}", seed=version, **options)

    def publish(
        self, version: int, local_dir: Path | None = None, **options: Any
    ) -> PublishedAdapter:
        arguments: dict[str, Any] = {
            "run": self.run_dir.name,
            "attempt": self.attempt,
            "version": version,
            "base_model": "base",
            "base_model_digest": "ab" * 32,
            "private_key": PRIVATE_KEY,
            "live": [],
            "now_unix_s": 1.7e9,
            "max_rank": 8,
        }
        return publish(local_dir or self.save(version), self.run_dir, **(arguments | options))

    def read(self, key: str) -> ListedCommit:
        return read_commit(self.run_dir, key, run=self.run_dir.name, public_key=PUBLIC_KEY)

    def keys(self, after_version: int = -1) -> list[str]:
        return list_commits(self.run_dir, self.attempt, after_version)


@dataclass
class Doomed(Heartbeat):
    """SIGKILL for the process that publishes with it, once it has read so many bytes."""

    left_bytes: int

    def beat(self, size_bytes: int) -> None:
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            os.kill(os.getpid(), signal.SIGKILL)
