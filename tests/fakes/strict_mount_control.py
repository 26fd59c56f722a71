"""How a test steers a `fakes.strict_mount_fs` process, and what that process tells.

JSON lines over its standard input and output: one command, one report. The end of its input means
that the test has gone, and so does the mount.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import BinaryIO, Final, Literal

import msgspec

FOREVER: Final = 1_000_000
Operation = Literal[
    "lookup", "readdir", "mkdir", "create", "open", "read", "write", "fsync", "close", "unlink"
]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How one host mounts the bucket. Times are in seconds; a TTL of 0 means no cache."""

    bucket: str
    path: str
    read_only: bool = False
    allow_delete: bool = False
    allow_overwrite: bool = False
    metadata_ttl_s: float = 0.0
    negative_ttl_s: float = 0.0
    listing_heals: bool = True
    """A listing that shows a name ends the remembered absence of it."""
    visible_after_s: float = 0.0
    """Other hosts see an object this long after its commit."""
    commit_delay_s: float = 0.0
    kernel_ttl_s: float = 0.1
    latency_s: dict[str, float] = msgspec.field(default_factory=dict)
    """By operation."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the next `times` calls of an operation, after `skip` that go well."""

    op: str
    act: Literal["error", "hang", "kill"]
    number: int = 0
    """The errno."""
    pattern: str = "*"
    """Of the key, as in a shell; `*` spans slashes."""
    skip: int = 0
    times: int = 1
    after: bool = False
    """The call takes effect first: the answer is lost, not the request."""


class Call(msgspec.Struct, frozen=True):
    """One call of the kernel, in the order in which they ended."""

    op: str
    key: str
    number: int
    """The errno of the answer, or 0."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`ops` counts the calls of the kernel, `requests` what S3 would have been asked for them."""

    ops: dict[str, int]
    requests: dict[str, int]
    hanging: int
    calls: list[Call] = []


class Arm(msgspec.Struct, tag=True, frozen=True):
    fault: Fault


class Release(msgspec.Struct, tag=True, frozen=True):
    """Disarm everything; what hangs goes on."""


class AwaitHung(msgspec.Struct, tag=True, frozen=True):
    """Answer when some call hangs, or when the time is over."""

    timeout_s: float


class Tell(msgspec.Struct, tag=True, frozen=True):
    """Answer with the report, as every command does; with the log of some operations in it."""

    ops: frozenset[str]


Command = Arm | Release | AwaitHung | Tell


class _Armed:
    def __init__(self, fault: Fault) -> None:
        self.fault, self.skip, self.times = fault, fault.skip, fault.times

    def fits(self, op: str, key: str) -> bool:
        """Whether it strikes this call; each call that could fit is counted."""
        if op != self.fault.op or not fnmatchcase(key, self.fault.pattern) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Control:
    """Faults, counters and the log of one mount. Shared by its threads."""

    def __init__(self, latency_s: dict[str, float]) -> None:
        self._latency_s = latency_s
        self._changed = threading.Condition()
        self._armed: list[_Armed] = []
        self._hanging = 0
        self._releases = 0
        self._requests: Counter[str] = Counter()
        self._ops: Counter[str] = Counter()
        self._calls: list[Call] = []

    def count(self, **requests: int) -> None:
        """`head`, `list`, `get` and `put`, as S3 bills them."""
        with self._changed:
            self._requests.update(requests)

    @contextmanager
    def operation(self, op: Operation, key: str, pid: int) -> Iterator[None]:
        """Everything that a test may do to a call. Faults raise OSError."""
        number = 0
        try:
            fault = self._strike(op, key)
            if wait_s := self._latency_s.get(op, 0.0):
                threading.Event().wait(wait_s)
            if fault is not None and not fault.after:
                self._act(fault, pid)
            yield
            if fault is not None and fault.after:
                self._act(fault, pid)
        except OSError as error:
            number = error.errno or 0
            raise
        finally:
            with self._changed:
                self._ops[op] += 1
                self._calls.append(Call(op, key, number))

    def _strike(self, op: str, key: str) -> Fault | None:
        with self._changed:
            struck = [armed.fault for armed in self._armed if armed.fits(op, key)]
        return struck[0] if struck else None

    def _act(self, fault: Fault, pid: int) -> None:
        match fault.act:
            case "error":
                raise OSError(fault.number, os.strerror(fault.number))
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "hang":
                self._hang()

    def _hang(self) -> None:
        with self._changed:
            release = self._releases + 1
            self._hanging += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._releases >= release)
            self._hanging -= 1

    def handle(self, command: Command) -> Report:
        calls: list[Call] = []
        with self._changed:
            match command:
                case Arm(fault):
                    self._armed.append(_Armed(fault))
                case Release():
                    self._armed.clear()
                    self._releases += 1
                    self._changed.notify_all()
                case AwaitHung(timeout_s):
                    self._changed.wait_for(lambda: self._hanging > 0, timeout_s)
                case Tell(ops):
                    calls = [call for call in self._calls if call.op in ops]
            return Report(
                ops=dict(self._ops),
                requests=dict(self._requests),
                hanging=self._hanging,
                calls=calls,
            )

    def serve(self, commands: BinaryIO, reports: BinaryIO) -> None:
        """Until the end of the commands; then the main thread is told to unmount."""
        for line in commands:
            report = self.handle(msgspec.json.decode(line, type=Command))
            reports.write(msgspec.json.encode(report) + b"\n")
            reports.flush()
        self.handle(Release())
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)
