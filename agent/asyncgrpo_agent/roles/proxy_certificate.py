"""The certificate that the proxy shows, kept valid while the proxy runs.

Without files given in the configuration the proxy's own CA issues one at each start, and another
before that one ends. Given files are loaded again when they change. New handshakes get what was
loaded last; links that are up are not touched.

A context of OpenSSL keeps one certificate for each type of key and chooses among them, so what is
loaded last need not be what peers see. Every pair therefore gets a context of its own, and each
handshake is handed to the newest when it begins: peers see one whole pair or another.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.net import tls
from asyncgrpo_agent.net.accept import PROTOCOLS
from asyncgrpo_agent.store import certificates, identity
from asyncgrpo_agent.store.audit import AuditLog

log = Log(__name__)

CHECK_EVERY_S: Final = 60.0
RENEW_BEFORE: Final = timedelta(days=30)


def _utc_now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 - a role reads the clock


class ServerCertificate:
    """`context` is the listener's for as long as the proxy runs. Raises ConfigError when made."""

    def __init__(self, config: Config, now: Callable[[], datetime] = _utc_now) -> None:
        self._config = config
        self._now = now
        self._renew_at = now()
        self._is_given = bool(config.proxy.certificate)
        self._files = self._given() if self._is_given else self._issue()
        self._stamp = _stamp(self._files)
        self.is_usable = True  # what is on disk; else the one loaded before is shown
        self.context = self._newest = self._load()
        # Called for every handshake, whether the peer names a server or not.
        self.context.sni_callback = self._hand_over

    async def keep(self) -> None:
        """Renew or load again, for ever."""
        while True:
            await trio.sleep(CHECK_EVERY_S)
            try:
                self.refresh()
            except (AgentError, OSError) as error:
                log.error("certificate.unusable", reason=str(error), shown="the one loaded before")

    def refresh(self) -> None:
        """Load another certificate if it is time. Raises AgentError or OSError."""
        if self._is_given:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return
            self._stamp = stamp  # a pair that does not fit is tried again once it changes
        elif self._now() < self._renew_at:
            return
        self.is_usable = False  # until it is loaded
        if not self._is_given:
            self._issue()
        self._newest = self._load()
        self.is_usable = True
        log.info("certificate.loaded", file=str(self._files[0]))
        audit = AuditLog(self._config.state_dir)
        audit.record("certificate.loaded", self._now().timestamp(), file=str(self._files[0]))

    def has_ended(self) -> bool:
        return self._now() >= self.ends_at

    def _load(self) -> ssl.SSLContext:
        context = tls.server_context(*self._files, PROTOCOLS)
        self.ends_at = certificates.ends_at(self._files[0].read_bytes())
        return context

    def _hand_over(
        self, handshake: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        handshake.context = self._newest

    def _given(self) -> tuple[Path, Path]:
        return Path(self._config.proxy.certificate), Path(self._config.proxy.key)

    def _issue(self) -> tuple[Path, Path]:
        now, state_dir = self._now(), self._config.state_dir
        ca_pem, ca_key = identity.ensure_ca(state_dir, now)
        names = [host_port(address)[0] for address in self._config.proxy.public_addresses]
        chain, key = certificates.issue_server(ca_pem, ca_key, names, now=now)
        files = identity.save_server_certificate(state_dir, chain, key)
        self._renew_at = now + certificates.SERVER_LIFE - RENEW_BEFORE
        return files


def _stamp(files: tuple[Path, Path]) -> list[tuple[int, ...]]:
    """Differs after every change, that of an owner or a mode included."""
    try:
        found = [path.stat() for path in files]
    except OSError:
        return []
    return [(stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for stat in found]
