"""A `fakes.link_server` as tests see it: its address, its log, and what it has cost so far."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - fixtures of tests that run no trio use it too
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from asyncgrpo_agent.store.certificates import issue_server
from fakes.certificates import authority, today

_TESTS = Path(__file__).parent.parent
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Memory that was held at the highest, CPU that was spent, since some moment."""

    rss_mib: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    port: int
    pid: int
    log: Path
    ca: Path
    flags: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def now(self) -> Cost:
        """Resident memory now and CPU since the start; the peak begins anew."""
        cost = Cost(rss_mib=self._memory_mib("VmRSS"), cpu_s=self._cpu_s())
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return cost

    def since(self, before: Cost) -> Cost:
        return Cost(
            rss_mib=self._memory_mib("VmHWM") - before.rss_mib,
            cpu_s=self._cpu_s() - before.cpu_s,
        )

    def _memory_mib(self, name: str) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        raise AssertionError(f"no {name} of process {self.pid}")

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server with its files in `folder`; the certificate is of the tests' own CA."""
    chain, key = issue_server(*authority(), ["localhost", "127.0.0.1"], now=today())
    (folder / "ca.pem").write_bytes(authority()[0])
    (folder / "chain.pem").write_bytes(chain)
    (folder / "key.pem").write_bytes(key)
    log = folder / "server.log"
    command = [sys.executable, "-m", "fakes.link_server", "chain.pem", "key.pem", *flags]
    environ = {**os.environ, "PYTHONPATH": f"{_TESTS}:{_TESTS.parent / 'agent'}"}
    pipe = subprocess.PIPE
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            port = int(child.stdout.readline() or 0)
            assert port, log.read_text()
            yield ServerProcess(
                port=port, pid=child.pid, log=log, ca=folder / "ca.pem", flags=flags
            )
        finally:
            child.kill()
