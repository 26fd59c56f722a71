"""Whether a proxy can let agents in and serve them, with the reasons if it cannot.

Strangers may ask, so no reason names a run, a replica or a file; the proxy's log does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.roles.proxy_admission import Admission
from asyncgrpo_agent.roles.proxy_certificate import ServerCertificate
from asyncgrpo_agent.store import private_files

LOOK_EVERY_S: Final = 10.0


@dataclass(slots=True)
class ProxyHealth:
    """Of one proxy."""

    state_dir: Path
    admission: Admission
    certificate: ServerCertificate | None = None
    is_stopping: bool = False
    _is_writable: bool = True
    _looked_at: float = -math.inf

    def reasons(self) -> list[str]:
        """Empty when it is ready."""
        found = []
        if self.certificate is None:
            found.append("the proxy is starting")
        elif self.certificate.has_ended():
            found.append("the certificate has expired")
        elif not self.certificate.is_usable:
            found.append("the certificate's files cannot be used; an earlier one is shown")
        if not self._can_write():
            found.append("the state folder cannot be written to")
        if not self.admission.reads_tokens:
            found.append("the file of tokens cannot be read")
        if self.is_stopping:
            found.append("the proxy is stopping")
        return found

    def _can_write(self) -> bool:
        """Looked at now and then: however often strangers ask, the disk hears little of it."""
        now = trio.current_time()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._is_writable = private_files.is_writable(self.state_dir)
        return self._is_writable
