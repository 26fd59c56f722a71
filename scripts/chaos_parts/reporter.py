"""Whether a fault was told by the agents, with its cause, within some seconds of its beginning.

Today that is what their logs say. Another source needs the two methods of `Report` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from schedule import Fault

WITHIN_S: Final = 30.0
_LOST: Final = (
    r"replica.state .*replica={host} .*after=(GONE|SUSPECT)|replica.evicted_ghost .*{host}"
)
_LINK: Final = r"link\.(lost|closed|unreachable|broken)"

# What is said of each kind, by any agent. An empty pattern: nothing is lost, nothing need be said.
SAID: Final[Mapping[str, str]] = {
    "kill-replica": _LOST,
    "kill-vllm": r"engine\.restarting|engine.state ready=False",
    "kill-mount-worker": r"bucket\.worker_ended",
    "stop-replica": _LOST,
    "stop-vllm": rf"engine\.silent|{_LOST}",
    "stop-mount-worker": r"mount\.hung",
    "kill-proxy": _LINK,
    "stop-proxy": "",
    "stop-trainer": "",
    "stop-trl": "",
    "kill-trainer": r"trainer\.left",
    "kill-trl": r"trainer\.again",
    "move-trainer": r"trainer\.left",
    "deaf-up": _LOST,
    "deaf-down": _LOST,
    "stalled-link": _LOST,
    "slow-link": "",
    "reset-link": rf"{_LOST}|{_LINK}",
    "deaf-trainer": r"trainer\.left",
    "reset-trainer": rf"trainer\.left|{_LINK}",
    "restart-proxy": r"proxy\.stopping",
    "move-proxy": _LINK,
    "leave": r"replica.state .*replica={host} .*after=(DRAINING|GONE)",
    "rotate-token": r"replica.state .*replica={host} .*after=(DRAINING|GONE)",
    "upgrade": r"replica.state .*replica={host} .*after=(DRAINING|GONE)",
    "bucket-outage": r"round_failed|unpublished|bucket.unavailable",
    "mount-eio": r"round_failed|bucket.read_again|adapter.put_off",
    "mount-hung": r"mount\.hung",
    "mount-dead": r"the mount is dead",
    "corrupt-object": r"adapter\.(refused|put_off)",
    "forged-commit": r"commit.unreadable|adapter.refused|refused",
    "vllm-hangs": _LOST,
    "vllm-lies": r"adapter.put_off .*vLLM lists",
    "vllm-forgets": "",
    "disk-full": r"No space left|put_off|round_failed|high_water.unwritten",
}


class Report(Protocol):
    """Where agents say what is wrong."""

    def begin(self, fault: Fault) -> None:
        """It strikes now."""

    def told(self, fault: Fault) -> str:
        """What was said of it since; empty if nothing."""


class Logs:
    """The files of all agents of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[int, dict[Path, int]] = {}

    def begin(self, fault: Fault) -> None:
        self._sizes[fault.number] = {path: path.stat().st_size for path in self._files()}

    def told(self, fault: Fault) -> str:
        wanted = re.compile(SAID[fault.kind].replace("{host}", fault.host))
        if not wanted.pattern:
            return "nothing to tell"
        sizes = self._sizes[fault.number]
        for path in self._files():
            for line in logged(path, sizes.get(path, 0)):
                text = " ".join([line["event"], *(f"{k}={v}" for k, v in line.items())])
                if wanted.search(text):
                    return f"{path.stem}: {text}"
        return ""

    def _files(self) -> Iterable[Path]:
        return self._folder.glob("*.out")


def logged(path: Path, begin: int = 0) -> Iterator[dict[str, Any]]:
    """What an agent said from a place in its log on; last words of others are left out."""
    with path.open("rb") as file:
        file.seek(begin)
        for line in file.read().splitlines():
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict) and "event" in value:
                    yield value
