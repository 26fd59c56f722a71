"""Logging: one line an event, `event key=value ...`, on standard error.

Event names are stable, past-tense or state words (`link.up`, `adapter.loaded`). Severity follows
the effect on the run. Never log header values, tokens, keys or prompts. In case an error of
somebody else's quotes one, secrets that this process was given (`hide`) and what looks like one are
taken out of every line, and of the traceback of a crash.

Peers decide how often some events happen, so lines of each event are bounded (`core.log_rate`).
What is held back is counted, and `event suppressed=N` says so, within WINDOW_S and at the end of
the process. Lines for debugging are not bounded: who asks for them wants all of them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final

from asyncgrpo_agent.core.log_rate import HeldBack, LogRate

RECENT_LINES: Final = 500
RECENT_CHARACTERS: Final = 2000  # of one line
MAX_VALUE_CHARACTERS: Final = 16_384  # of one field; the last lines of a child are long
_CUT: Final = "[cut]"
_PEER_FIELDS: Final = ("peer", "replica")  # whom a line is about
_FIELDS: Final = "agent_fields"
_HIDDEN: Final = "***"
# A word that a text must hold, in lower case, and what is then replaced in it.
_LOOKS: Final = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("agrpo1.", r"agrpo1\.[A-Za-z0-9_-]{16,}"),
        ("://", r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)"),
        ("hf_", r"\bhf_[A-Za-z0-9]{16,}"),
        ("ia", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
        ("bearer ", r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
        ("x-amz-", r"(?i)(?<=x-amz-)(?:signature|security-token|credential)[=:]\s*[^\s&\"]+"),
        (
            "=",
            r"(?:(?<=TOKEN=)|(?<=_KEY=)|(?<=CRET=)|(?<=WORD=))[^\s\"']{4,}",
        ),  # as `env` shows variables
    )
)
MIN_SECRET_CHARACTERS: Final = 8  # shorter ones are words that lines are full of

_held: list[str] = []  # secrets of this process, longest first


def hide(*secrets: str) -> None:
    """Have these replaced in whatever this process shows, from now on."""
    found = {one for one in secrets if len(one) >= MIN_SECRET_CHARACTERS}
    _held[:] = sorted({*_held, *found}, key=len, reverse=True)


def without_secrets(text: str) -> str:
    """`text` without the secrets of this process and what looks like one."""
    for secret in _held:
        text = text.replace(secret, _HIDDEN)
    lower = text.lower()
    for word, pattern in _LOOKS:
        if word in lower:
            text = pattern.sub(_HIDDEN, text)
    return text


class Log:
    """The logger of one module; fields are given by name and never formatted by the caller."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """An error with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, with_trace=True)

    def _emit(
        self, level: int, event: str, fields: Mapping[str, object], *, with_trace: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: dict(fields)}, exc_info=with_trace)


def _bounded(value: object) -> object:
    """What a peer says may be of any length."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    return value if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + _CUT


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(_bounded(value))
    plain = text and not any(c in ' "=\\' or not c.isprintable() for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class LineFormatter(logging.Formatter):
    """`LEVEL event key=value ...`; journald and the terminal add the time."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        parts = [record.levelname, record.getMessage()]
        parts += [f"{key}={_value(value)}" for key, value in fields.items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return without_secrets(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the wall-clock time in seconds."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "event": record.getMessage(),
            **{name: _bounded(value) for name, value in fields.items()},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return without_secrets(json.dumps(line, default=str))


class _Recent(logging.Handler):
    """Keeps the newest lines, for a dump of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=RECENT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%H:%M:%SZ", time.gmtime(record.created))
        self.lines.append(f"{at} {self.format(record)}"[:RECENT_CHARACTERS])


class Gate(logging.Handler):
    """Hands on to `targets` what the rate allows, and tells what it did not."""

    def __init__(
        self, targets: Sequence[logging.Handler], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._targets = targets
        self._clock = clock
        self._rate = LogRate()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Under this handler's lock, as all that follows."""
        fields: Mapping[str, object] | None = getattr(record, _FIELDS, None)
        # Texts of other libraries have words of peers within; their loggers' names do not.
        event = record.name if fields is None else record.getMessage()
        peer = _peer_of(fields or {})
        if record.levelno <= logging.DEBUG or self._rate.allows(
            event, peer, record.levelno, self._clock()
        ):
            self._hand_on(record)
        elif self._timer is None:
            self._wait()

    def close(self) -> None:
        """At the end of the process, too, by way of `logging.shutdown`."""
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._tell(self._rate.rest())
        super().close()

    def tell_due(self) -> None:
        with self._locked():
            self._timer = None
            self._tell(self._rate.due(self._clock()))
            self._wait()

    def _wait(self) -> None:
        due_s = self._rate.due_s()
        if due_s is None:
            return
        self._timer = threading.Timer(max(0.0, due_s - self._clock()), self.tell_due)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no thread can be had, or no longer: told at the end
            self._timer = None

    def _tell(self, counts: Sequence[HeldBack]) -> None:
        for one in counts:
            record = logging.makeLogRecord({"name": __name__, "msg": one.event})
            record.levelno, record.levelname = one.severity, logging.getLevelName(one.severity)
            fields: dict[str, object] = {"suppressed": one.lines}
            if one.peers:
                fields |= {"peers": len(one.peers), "peer": min(one.peers)}
            setattr(record, _FIELDS, fields)
            self._hand_on(record)

    def _hand_on(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            target.handle(record)

    def _locked(self) -> threading.RLock:
        assert self.lock is not None
        return self.lock


def _peer_of(fields: Mapping[str, object]) -> str:
    """Without its port, of which each connection has another."""
    for name in _PEER_FIELDS:
        if found := fields.get(name):
            text = str(found)
            host, colon, port = text.rpartition(":")
            return host if colon and port.isdecimal() else text
    return ""


_recent: Final = _Recent()
_recent.setFormatter(LineFormatter())


def recent() -> list[str]:
    """The newest lines of this process, the oldest first."""
    return list(_recent.lines)


def _write_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Python's own, without secrets."""
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(without_secrets(text))


def set_up(*, as_json: bool, level: str) -> None:
    """Install the handlers of this process. `level` is a name of the logging module."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    before = [one for one in root.handlers if isinstance(one, Gate)]
    root.handlers[:] = [Gate([handler, _recent])]
    for one in before:
        one.close()
    sys.excepthook = _write_crash
    root.setLevel(level)
    # Their debug output contains header values, which may hold tokens.
    for noisy in ("h2", "hpack", "watchfiles", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
