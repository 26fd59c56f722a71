"""What the trainers of a proxy's runs have said that their runs are, kept for those who join.

The proxy cannot change a record unseen: it is sealed with the run's key. It keeps the newest, on
disk too, so that replicas may come while neither the trainer nor an earlier proxy is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asyncgrpo_agent.core.run_record import MAX_RECORD_BYTES
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store import run_records

log = Log(__name__)


@dataclass(slots=True)
class RunRecords:
    state_dir: Path
    _known: dict[str, bytes] = field(default_factory=dict)

    def of(self, run: str) -> bytes:
        """b"" if no trainer has said anything."""
        if run not in self._known:
            try:
                self._known[run] = run_records.read(run_records.of_proxy(self.state_dir, run))
            except OSError as error:
                log.warning("record.unread", run=run, reason=error.strerror)
                return b""
        return self._known[run]

    def keep(self, run: str, record: str) -> None:
        """Of a trainer that has joined; an older one says nothing."""
        data = record.encode()
        if not data or data == self.of(run):
            return
        if len(data) > MAX_RECORD_BYTES:
            log.warning("record.ignored", run=run, bytes=len(data))
            return
        self._known[run] = data
        try:
            run_records.write(run_records.of_proxy(self.state_dir, run), data)
        except OSError as error:  # it is known until the proxy ends
            log.error("record.unsaved", run=run, reason=error.strerror)
