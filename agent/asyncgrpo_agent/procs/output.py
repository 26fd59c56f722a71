"""What a child writes: taken at once, cut into lines, kept, written down and handed on.

Invariant: taking output never waits, neither for whoever listens to the lines nor for memory. The
last lines are kept; lines that the listener is too slow for are dropped for it and counted; lines
without an end are cut, and of a child that writes without end only so many bytes a second go
anywhere but into the last lines; a line says how much was left out. A log file that cannot be
written is given up, with a warning. Secrets of the child's environment, join lines and URLs'
passwords are in no line that leaves here.
"""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import trio

from asyncgrpo_agent.core.log_rate import ByteRate
from asyncgrpo_agent.logs import Log, without_secrets

TAIL_LINES: Final = 50  # what a person wants to read
KEPT_LINES: Final = 200  # what a search for the cause needs: vLLM dies with several tracebacks
MAX_LINE_CHARS: Final = 8192
MAX_LOG_BYTES: Final = 10 << 20  # one older file of this size is kept beside it, as NAME.1
_WAITING_LINES: Final = 1000
_CUT: Final = " [cut]"
log = Log(__name__)


class Lines:
    """Bytes in, whole lines out. A carriage return ends a line too, as progress bars write it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._is_cut = False  # the rest of the current line is thrown away

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that `data` completes, without empty ones."""
        *whole, rest = self._decoder.decode(data, final).replace("\r", "\n").split("\n")
        lines = [line for text in whole if (line := self._add(text, ends=True))]
        if line := self._add(rest, ends=final):
            lines.append(line)
        return lines

    def _add(self, text: str, *, ends: bool) -> str:
        """Continue the current line; its text if it is complete, or has just become too long."""
        was_cut = self._is_cut
        line = "" if was_cut else self._partial + text
        self._is_cut = not ends and (was_cut or len(line) > MAX_LINE_CHARS)
        if len(line) > MAX_LINE_CHARS:
            line = line[:MAX_LINE_CHARS] + _CUT
        self._partial = "" if ends or self._is_cut else line
        return line if ends or self._is_cut else ""


class LogFile:
    """Appends to one file; the full one becomes NAME.1, in place of the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, text: str) -> None:
        """May raise OSError."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)
        self._file.write(text.encode(errors="replace"))
        if self._file.tell() > MAX_LOG_BYTES:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Output:
    """The output of one child."""

    def __init__(
        self,
        name: str,
        *,
        on_line: Callable[[str], None] | None,
        log_file: Path | None,
        secrets: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._clock = clock
        self._rate = ByteRate()
        self._left_out_lines = 0
        self._left_out_bytes = 0
        self._secrets = secrets
        self._on_line = on_line
        self._log_file = LogFile(log_file) if log_file else None
        self._lines = Lines()
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._send, self._receive = trio.open_memory_channel[str](_WAITING_LINES)
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        self._take(self._lines.feed(data))

    def close(self) -> None:
        """Nothing more will come. Calling it again does nothing."""
        self._take(self._lines.feed(b"", final=True))
        self._give(self._gap())
        self._send.close()
        if self._log_file:
            self._log_file.close()
        if self._dropped:
            log.warning("child.lines_dropped", child=self._name, lines=self._dropped)
            self._dropped = 0

    async def deliver(self) -> None:
        """Call the listener with each line until `close`, cancelled or not: last lines matter."""
        with trio.CancelScope(shield=True):
            async for line in self._receive:
                if self._on_line:
                    self._on_line(line)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last `lines`, of which no more than KEPT_LINES are there."""
        return "\n".join([*self._tail][-lines:])

    def _take(self, found: list[str]) -> None:
        lines = [self._shown(line) for line in found]
        self._tail.extend(lines)
        self._give(self._within_rate(lines))

    def _within_rate(self, lines: list[str]) -> list[str]:
        now_s = self._clock()
        kept: list[str] = []
        for line in lines:
            size_bytes = len(line.encode(errors="replace")) + 1
            if self._rate.allows(size_bytes, now_s):
                kept += [*self._gap(), line]
            else:
                self._left_out_lines += 1
                self._left_out_bytes += size_bytes
        return kept

    def _gap(self) -> list[str]:
        """The line in place of those that were left out, if any were."""
        if not self._left_out_lines:
            return []
        told = f"[{self._left_out_lines} lines, {self._left_out_bytes} bytes left out: too many]"
        self._left_out_lines = self._left_out_bytes = 0
        return [told]

    def _give(self, lines: list[str]) -> None:
        if lines and self._log_file:
            self._write(self._log_file, lines)
        for line in lines if self._on_line else ():
            try:
                self._send.send_nowait(line)
            except trio.WouldBlock:
                self._dropped += 1
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the listener failed, which its own task reports

    def _shown(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return without_secrets(line)

    def _write(self, file: LogFile, lines: list[str]) -> None:
        try:
            file.write("\n".join(lines) + "\n")
        except OSError as error:
            log.warning("child.log_lost", child=self._name, reason=error.strerror)
            self._log_file = None
