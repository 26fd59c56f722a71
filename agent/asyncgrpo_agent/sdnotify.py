"""Telling systemd how this process is: ready, status line, stopping, watchdog.

Without $NOTIFY_SOCKET nothing is sent. A message that cannot be delivered is dropped: service
managers come and go, and no agent stops for that. Nothing here blocks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.logs import Log

_MICROSECONDS: Final = 1_000_000
_MAX_DATAGRAM_BYTES: Final = 4096
log = Log(__name__)


class Notifier:
    """One datagram a call. `watchdog_interval_s` is how often `alive` is due, 0 for never."""

    def __init__(self, address: str = "", *, watchdog_s: float = 0.0) -> None:
        # A leading @ stands for the zero byte of an abstract name.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        # Half of what systemd waits, as sd_watchdog_enabled(3) recommends.
        self.watchdog_interval_s = watchdog_s / 2 if address else 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, pid: int | None = None) -> Notifier:
        """As systemd described it. `pid` is this process's; a watchdog may be meant for another."""
        pid = os.getpid() if pid is None else pid
        usec = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        watchdog_s = int(usec) / _MICROSECONDS if usec.isdecimal() and is_ours else 0.0
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send("STATUS=" + " ".join(text.split()))

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def watch_loop(self) -> None:
        """Feed the watchdog for as long as the event loop of the caller turns.

        As a task of the loop's own, so that a loop that is stuck, and nothing else, starves it.
        """
        if self.watchdog_interval_s:
            trio.lowlevel.spawn_system_task(self._feed, name="watchdog")

    async def _feed(self) -> None:
        while True:
            self.alive()
            await trio.sleep(self.watchdog_interval_s)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.debug("sdnotify.dropped", message=message, reason=error.strerror)


class NotifySocket:
    """The other end, for an agent that starts agents: what one of them would tell systemd.

    Iterating gives each datagram as its lines.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self.address)
            self._socket = trio.socket.from_stdlib_socket(listener)
        except BaseException:
            listener.close()
            raise

    def __aiter__(self) -> AsyncIterator[list[str]]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[list[str]]:
        while True:
            data = await self._socket.recv(_MAX_DATAGRAM_BYTES)
            yield data.decode(errors="replace").splitlines()

    def close(self) -> None:
        self._socket.close()
