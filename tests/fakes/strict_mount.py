"""A bucket in a local folder, mounted by any number of hosts as strictly as Mountpoint does it.

    bucket = StrictBucket(tmp_path)
    with bucket.mount("trainer") as trainer, bucket.mount("replica", read_only=True) as replica:
        replica.fail("read", errno.EIO, pattern="*/adapter_model.safetensors")

Real FUSE, one process a host. Needs /dev/fuse and libfuse3 (`apt-get install fuse3`). Where the
device is missing, tests are skipped, but never where the environment says that this is CI.
"""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - a host is a process of its own
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

from fakes.strict_mount_control import (
    FOREVER,
    Arm,
    AwaitHung,
    Call,
    Command,
    Fault,
    Operation,
    Options,
    Release,
    Report,
    Tell,
)
from fakes.strict_mount_objects import Objects

_TESTS: Final = Path(__file__).parent.parent
_DEVICE: Final = Path("/dev/fuse")
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How long a mount believes what it has seen. Shorten one with `dataclasses.replace`."""

    metadata_ttl_s: float
    negative_ttl_s: float
    listing_heals: bool = True
    visible_after_s: float = 0.0


MINIMAL: Final = Preset(metadata_ttl_s=0.0, negative_ttl_s=0.0)  # Mountpoint's defaults
CACHE: Final = Preset(metadata_ttl_s=60.0, negative_ttl_s=60.0)  # Mountpoint with --cache
HF_LIKE: Final = Preset(
    metadata_ttl_s=10.0, negative_ttl_s=5.0, listing_heals=False, visible_after_s=2.5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Calls of the kernel, and the requests to S3 that follow from them.

    Each lookup of one component of a path that was not seen within the last 0.1 s is a HEAD and a
    LIST, a listing is a LIST for 1000 names, a file read in sequence is a GET, 8 MiB are a PUT.
    """

    lookups: int
    listings: int
    head: int
    list: int
    get: int
    put: int

    def since(self, before: Counters) -> Counters:
        old = asdict(before)
        return Counters(**{name: value - old[name] for name, value in asdict(self).items()})


class Host:
    """One mount. After `kill`, `unmount` and `remount` counters begin anew."""

    def __init__(self, options: Options, log: Path) -> None:
        self.path = Path(options.path)
        self._options = options
        self._log = log
        self._process = self._start()

    # --- what a test does to it -------------------------------------------------------------

    def fail(
        self,
        op: Operation,
        number: int,
        *,
        pattern: str = "*",
        skip: int = 0,
        times: int = FOREVER,
        after: bool = False,
    ) -> None:
        """Calls fail with an errno; with `after`, once they have had their effect."""
        options = {"pattern": pattern, "skip": skip, "times": times, "after": after}
        self._arm(Fault(op=op, act="error", number=number, **options))  # type: ignore[arg-type]

    def hang(self, op: Operation, *, pattern: str = "*", skip: int = 0) -> None:
        """Calls get no answer before `release`. Not even SIGKILL ends who waits for one."""
        self._arm(Fault(op=op, act="hang", pattern=pattern, skip=skip, times=FOREVER))

    def kill_caller(self, op: Operation, *, pattern: str = "*", skip: int = 0) -> None:
        """SIGKILL for the process that makes the call, at that very moment."""
        self._arm(Fault(op=op, act="kill", pattern=pattern, skip=skip))

    def release(self) -> None:
        """All is well again: no faults, and what hangs goes on."""
        self._ask(Release())

    def kill(self) -> None:
        """The daemon dies: ENOTCONN, and the mount table does not show it."""
        self._process.kill()
        self._reap()

    def unmount(self) -> None:
        """In good order; the bare mount point stays, an empty folder."""
        self.release()
        _fusermount("-u", self.path)
        self._reap()

    def remount(self, *, read_only: bool | None = None) -> None:
        """The operator's two commands, maybe with another flag than before for this once."""
        self._stop()
        before = self._options
        if read_only is not None:
            self._options = msgspec.structs.replace(before, read_only=read_only)
        self._process = self._start()
        self._options = before

    # --- what a test learns from it ---------------------------------------------------------

    def counters(self) -> Counters:
        report = self._ask(Tell(frozenset()))
        s3 = {name: report.requests.get(name, 0) for name in ("head", "list", "get", "put")}
        lookups, listings = report.ops.get("lookup", 0), report.ops.get("readdir", 0)
        return Counters(lookups=lookups, listings=listings, **s3)

    def calls(self, *ops: Operation) -> list[Call]:
        """All calls of these operations so far."""
        return self._ask(Tell(frozenset(ops))).calls

    def await_hung(self, timeout_s: float = 10.0) -> None:
        assert self._ask(AwaitHung(timeout_s)).hanging, "nothing hangs"

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    # --- its process ------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        options = msgspec.json.encode(self._options).decode()
        environ = {**os.environ, "PYTHONPATH": str(_TESTS), "FUSE_LIBRARY_NAME": "fuse3"}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fakes.strict_mount_fs", options],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.kill()
            _close(process)
            pytest.fail(f"cannot mount; `apt-get install fuse3`? {self._log.read_text()}")
        return process

    def _arm(self, fault: Fault) -> None:
        self._ask(Arm(fault))

    def _ask(self, command: Command) -> Report:
        commands, reports = self._process.stdin, self._process.stdout
        assert commands is not None
        assert reports is not None
        commands.write(msgspec.json.encode(command) + b"\n")
        commands.flush()
        return msgspec.json.decode(reports.readline(), type=Report)

    def _stop(self) -> None:
        """Ends in any case, whatever hangs and whoever still holds a file open."""
        if self._process.returncode is None:
            with suppress(OSError, msgspec.DecodeError):
                self.release()
        for flag in ("-u", "-uz"):
            if _is_mounted(self.path):
                _fusermount(flag, self.path, must=False)
        self._reap()

    def _reap(self) -> None:
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        _close(self._process)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


def _is_mounted(path: Path) -> bool:
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    return str(path) in (line.split()[4] for line in table)


def _fusermount(flag: str, path: Path, *, must: bool = True) -> None:
    command = ["fusermount3", flag, str(path)]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, check=False, timeout=_STOP_S)
        assert not must or done.returncode == 0, done.stderr.decode()


class StrictBucket:
    """The bucket itself, as an owner's console would show it."""

    def __init__(self, folder: Path) -> None:
        if not _DEVICE.exists():
            if "CI" in os.environ:
                pytest.fail("CI must have /dev/fuse: this bucket is what stands for Mountpoint")
            pytest.skip("no /dev/fuse here: nothing can be mounted")
        self._folder = folder.resolve()
        self._hosts = self._folder / "hosts"
        self._objects = Objects(self._folder / "bucket")

    def keys(self, prefix: str = "") -> list[str]:
        """All complete objects that every host can see."""
        return [key for key in self._objects.keys() if key.startswith(prefix)]  # noqa: SIM118

    def read(self, key: str) -> bytes:
        return (self._folder / "bucket" / "objects" / key).read_bytes()

    def clear(self) -> None:
        """Everything is gone, with no host to know of it."""
        self._objects.clear()

    @contextmanager
    def mount(
        self,
        name: str,
        *,
        preset: Preset = MINIMAL,
        read_only: bool = False,
        allow_delete: bool = False,
        allow_overwrite: bool = False,
        commit_delay_s: float = 0.0,
        kernel_ttl_s: float = 0.1,
        latency_s: Mapping[str, float] | None = None,
    ) -> Iterator[Host]:
        """A host that mounts the bucket; its mount point is named after it.

        `kernel_ttl_s` is what even Mountpoint without a cache believes; with 0 each call looks up
        every part of its path.
        """
        path = self._hosts / name
        path.mkdir(parents=True)
        options = Options(
            bucket=str(self._folder / "bucket"),
            path=str(path),
            read_only=read_only,
            allow_delete=allow_delete,
            allow_overwrite=allow_overwrite,
            commit_delay_s=commit_delay_s,
            kernel_ttl_s=kernel_ttl_s,
            latency_s=dict(latency_s or {}),
            **asdict(preset),
        )
        host = Host(options, self._hosts / f"{name}.log")
        try:
            yield host
        finally:
            host._stop()
            path.rmdir()
