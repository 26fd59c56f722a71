"""A real S3 server: SeaweedFS, all of it in one process on loopback, all data in one folder.

    with seaweedfs.serving(tmp_path) as store, S3Relay(store.address) as relay:
        ...  # clients use relay.address and the keys here; relay.requests counts

It checks keys, and is held to little memory. Where `weed` is missing tests are skipped, but never
where the environment says that this is CI.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess  # noqa: TID251 - a server of others
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from fakes.relay import Relay

ACCESS_KEY: Final = "labkey"
SECRET_KEY: Final = "labsecret"
BUCKET: Final = "lab"
_READY: Final = "All enabled components are running"
_READY_S: Final = 20.0
_PORTS: Final = ("master", "volume", "filer", "s3", "admin")
# Each has a second port for gRPC, this much higher. Both stay below the ports that the kernel gives
# to clients, so that none is taken between the search and the start.
_GRPC: Final = 10_000
_FIRST_PORT: Final = 20_000
_LAST_PORT: Final = 22_000
_REQUEST_RE: Final = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (/[^/?]+/?\?)?\S* HTTP/1\.1\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A running server with an empty bucket."""

    address: str
    pid: int


def program(name: str) -> str:
    """An executable beside this Python or on the path; without it the test is skipped."""
    places = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=places)
    return found or missing(name)


def missing(what: str) -> str:
    """Skips the test, but never in CI."""
    if "CI" in os.environ:
        pytest.fail(f"CI must have {what}: see scripts/install and .ci/run")
    pytest.skip(f"no {what} here: no real S3 mounts")


@contextmanager
def serving(folder: Path) -> Iterator[Store]:
    """Run a server until the end of the block."""
    weed, log, data = program("weed"), folder / "weed.log", folder / "weed"
    data.mkdir()
    ports = dict(zip(_PORTS, _free_ports(), strict=True))
    flags = [f"-{name}.port={port}" for name, port in ports.items()]
    command = [weed, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags]
    command += [f"-bucket={BUCKET}", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **keys, "GOMEMLIMIT": "150MiB"},
        )
    try:
        _await_ready(process, log)
        yield Store(address=f"127.0.0.1:{ports['s3']}", pid=process.pid)
    finally:
        process.kill()  # an orderly end takes seconds, and nobody needs the data
        process.wait()
        _remove_sockets(ports.values())


def _free_ports() -> list[int]:
    """From a place of this process's own, since a server that has just started holds few yet."""
    first = _FIRST_PORT + 10 * (os.getpid() % 150)
    free = (port for port in range(first, _LAST_PORT) if _is_free(port))
    return [next(free) for _ in _PORTS]


def _is_free(port: int) -> bool:
    for one in (port, port + _GRPC):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", one))
            except OSError:
                return False
    return True


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while _READY not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"weed does not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.02)  # noqa: TID251 - another process has no virtual clock


def _remove_sockets(ports: Iterable[int]) -> None:
    """It makes Unix sockets in /tmp, wherever its data is, and leaves them there."""
    for port in ports:
        for number in (port, port + _GRPC):
            for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)


class S3Relay(Relay):
    """A relay that counts the requests to S3: "list", else the HTTP method in small letters."""

    def __init__(self, target: str) -> None:
        super().__init__(target, self._count)
        self.requests: Counter[str] = Counter()

    def _count(self, data: bytes) -> None:
        """A request begins a piece of data: no client here sends one before the last answer."""
        match = _REQUEST_RE.match(data)
        if match is not None:
            is_listing = match[1] == b"GET" and match[2]  # of the bucket, with a query
            self.requests["list" if is_listing else match[1].decode().lower()] += 1
