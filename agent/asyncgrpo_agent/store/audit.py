"""Who came in, who did not, and what was changed: one JSON object a line, `<state>/audit.jsonl`.

Written by a proxy and by the commands beside it: joins and refusals, uses of tokens, keys that are
made or that a name passes to, commits of adapters. Bounded: a full file becomes audit.jsonl.1, and
so on up to KEPT. Never a secret is in it: tokens are named by their ids, keys by their public
halves. What a peer says of itself is cut to MAX_CHARACTERS; how often strangers and peers cause a
line is for the caller to bound (`roles.proxy_admission`).

A disk that fails costs records and one line in the log, never a join.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Final

from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.private_files import private_folder

MAX_FILE_BYTES: Final = 4 << 20
KEPT: Final = 4
MAX_CHARACTERS: Final = 255
log = Log(__name__)


def audit_file(state_dir: Path) -> Path:
    return state_dir / "audit.jsonl"


class AuditLog:
    """Appends to the file of one state folder, beside whoever else does."""

    def __init__(self, state_dir: Path) -> None:
        self.path = audit_file(state_dir)
        self._is_failing = False
        self._is_cut = False  # the last line has no end

    def record(self, event: str, now_unix_s: float, /, **fields: object) -> None:
        line = {"t": round(now_unix_s, 3), "event": event}
        line |= {name: _bounded(value) for name, value in fields.items()}
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            if not self._is_failing:
                log.error("audit.unwritten", file=str(self.path), reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    def _append(self, line: bytes) -> None:
        private_folder(self.path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            whole = b"\n" + line if self._is_cut else line
            self._is_cut = os.write(descriptor, whole) < len(whole)
            if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
                self._rotate(descriptor)
        finally:
            os.close(descriptor)

    def _rotate(self, descriptor: int) -> None:
        """Leave it to another process that is at it; nobody waits for anybody here."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing it lets go
        except BlockingIOError:
            return
        if not os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
            return
        for number in range(KEPT, 0, -1):
            newer = self._numbered(number - 1)
            if newer.exists():
                newer.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def _bounded(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)[:MAX_CHARACTERS]
