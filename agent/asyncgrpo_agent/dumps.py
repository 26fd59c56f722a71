"""What a running agent is doing, written down on SIGUSR2: its tasks, threads, newest log lines.

An agent that runs has a note in its state folder (`dumps/PID.json`), by which `diag` finds it. The
dump is written by the signal's handler, between two bytecodes of whatever the agent is at, so that
one which is busy for ever tells, too; threads that sit in the kernel are written by faulthandler,
which needs no Python. Log lines and stacks hold no secret: values of variables are not shown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from asyncgrpo_agent import __version__, logs
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.store.private_files import private_folder

if TYPE_CHECKING:
    import trio

log = Log(__name__)

FOLDER: Final = "dumps"
SIGNAL: Final = signal.SIGUSR2
_SUFFIXES: Final = (".json", ".txt", ".threads", ".new")
Section = Callable[[], str]

_sections: dict[str, Section] = {}


@contextlib.contextmanager
def section(name: str, text: Section) -> Iterator[None]:
    """Have a dump say what `text` gives as well, as long as the block lasts."""
    _sections[name] = text
    try:
        yield
    finally:
        _sections.pop(name, None)


@contextlib.contextmanager
def on_signal(state_dir: Path, role: str) -> Iterator[None]:
    """Answer SIGUSR2 as long as the block lasts. Must be entered in the main thread.

    A state folder that cannot be written costs the dumps, never the agent.
    """
    folder = state_dir / FOLDER
    note = folder / f"{os.getpid()}.json"
    threads = folder / f"{os.getpid()}.threads"
    try:
        private_folder(state_dir)
        private_folder(folder)
        _clear(folder)
        note.write_text(json.dumps(_note(role)))
        file = threads.open("w")
    except OSError as error:
        log.warning("dumps.off", folder=str(folder), reason=error.strerror or str(error))
        yield
        return

    def write(_number: int, _frame: FrameType | None) -> None:
        path = folder / f"{os.getpid()}.txt"
        fresh = path.with_suffix(".new")
        try:
            fresh.write_text(text(role))
            fresh.replace(path)
        except OSError as error:
            log.warning("dump.unwritten", file=str(path), reason=error.strerror or str(error))
        else:
            log.info("dump.written", file=str(path))

    before = signal.signal(SIGNAL, write)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)
        signal.signal(SIGNAL, before)
        file.close()
        for path in (note, threads, note.with_suffix(".txt")):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Running:
    """An agent that can be asked for a dump."""

    pid: int
    role: str
    folder: Path

    @property
    def dump(self) -> Path:
        return self.folder / f"{self.pid}.txt"

    @property
    def threads(self) -> Path:
        return self.folder / f"{self.pid}.threads"


def running(folder: Path) -> list[Running]:
    """The agents whose notes are in `folder` and that run still, not others under their numbers."""
    found = []
    for note in sorted(folder.glob("*.json")):
        try:
            said = json.loads(note.read_text())
            pid, started, role = int(said["pid"]), int(said["started"]), str(said["role"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if started_ticks(pid) == started:
            found.append(Running(pid, role, folder))
    return found


def _clear(folder: Path) -> None:
    """Remove what agents that were killed have left."""
    alive = {str(one.pid) for one in running(folder)}
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES and path.stem not in alive:
            path.unlink(missing_ok=True)


def _note(role: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": started_ticks(os.getpid()),
        "role": role,
        "version": __version__,
        "argv0": sys.argv[0],
    }


def started_ticks(pid: int) -> int | None:
    """When that process began, in the kernel's clock ticks since boot; None if there is none.

    A number is given to another process once its owner has gone, but not at the same time.
    proc(5), /proc/pid/stat, field 22.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def text(role: str) -> str:
    """The whole dump. Whatever part of it fails is said in its place."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = f"asyncgrpo-agent {__version__}, role {role}, pid {os.getpid()}, {now}\n"
    parts = {"tasks": tasks, "threads": _threads, **_sections, "log": _log}
    return head + "".join(f"\n=== {name}\n{_said(part)}\n" for name, part in parts.items())


def _said(part: Section) -> str:
    try:
        return part()
    except Exception as error:  # a dump is made when things go wrong
        return f"({type(error).__name__}: {error})"


def tasks() -> str:
    """All tasks of the trio run of this thread as a tree, each with its stack."""
    import trio

    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        root = None
    return "no task runs" if root is None else "\n".join(_tree(root, 0))


def _tree(task: trio.lowlevel.Task, depth: int) -> Iterator[str]:
    margin = "  " * depth
    yield f"{margin}{task.name}"
    for frame, line in task.iter_await_frames():
        where = f"{_short(frame.f_code.co_filename)}:{line}"
        yield f"{margin}  | {where} {frame.f_code.co_name}"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tree(child, depth + 1)


def _threads() -> str:
    return "\n".join(line for one in sys._current_frames().items() for line in _thread(*one))


def _thread(ident: int, frame: FrameType) -> Iterator[str]:
    yield f"thread {ident}"
    for entry in traceback.extract_stack(frame):
        yield f"  | {_short(entry.filename)}:{entry.lineno} {entry.name}"


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-3:])


def _log() -> str:
    return "\n".join(logs.recent())
