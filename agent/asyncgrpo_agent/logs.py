"""Logging: one line an event, `event key=value ...`, on standard error.

Event names are stable, past-tense or state words (`link.up`, `adapter.loaded`). Severity follows
the effect on the run. Never log header values, tokens, keys or prompts. What looks like a join line
or a URL's password is taken out of every line, in case an error of somebody else's quotes one.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

RECENT_LINES: Final = 500
RECENT_CHARACTERS: Final = 2000  # of one line
_FIELDS: Final = "agent_fields"
_JOIN_LINE: Final = re.compile(r"agrpo1\.[A-Za-z0-9_-]{16,}")
_URL_PASSWORD: Final = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")
_HIDDEN: Final = "***"


def without_secrets(text: str) -> str:
    """`text` without join lines and the passwords of URLs."""
    if "agrpo1." in text:
        text = _JOIN_LINE.sub(_HIDDEN, text)
    return _URL_PASSWORD.sub(_HIDDEN, text) if "://" in text else text


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
        self._emit(logging.ERROR, event, fields, traceback=True)

    def _emit(
        self, level: int, event: str, fields: Mapping[str, object], *, traceback: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: dict(fields)}, exc_info=traceback)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
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
            **fields,
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


_recent: Final = _Recent()
_recent.setFormatter(LineFormatter())


def recent() -> list[str]:
    """The newest lines of this process, the oldest first."""
    return list(_recent.lines)


def set_up(*, as_json: bool, level: str) -> None:
    """Install the one handler of this process. `level` is a name of the logging module."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler, _recent]
    root.setLevel(level)
    # Their debug output contains header values, which may hold tokens.
    for noisy in ("h2", "hpack", "watchfiles", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
