"""Two hosts on one machine: network namespaces joined by a cable, one of them behind a wall.

Needs root, `ip` and `nft`; where they are missing, tests that ask for it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess  # noqa: TID251 - tests arrange the machine around the agents
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OPEN_HOST = "10.213.7.1"
WALLED_HOST = "10.213.7.2"

# Nothing comes in but answers, and the one way out is `port` of the open host. Not even loopback.
_WALL = """
table inet wall {{
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
  }}
  chain output {{
    type filter hook output priority 0; policy drop;
    ct state established,related accept
    ip daddr {host} tcp dport {port} accept
  }}
}}
"""

# What comes by the cable is lost, as in a router that fails: no answer, no reset. The sender's
# packets do leave it, which a rule on its own side would tell it they did not.
_DEAF = """
table inet deaf {
  chain input {
    type filter hook input priority -200; policy accept
    iifname "cable" drop
  }
}
"""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One host. `within` makes a command run on it."""

    name: str
    address: str

    @property
    def within(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name)

    def deafen(self) -> None:
        """Lose every packet that arrives here, of connections that are up as well."""
        _run(*self.within, "nft", "-f", "-", text=_DEAF)

    def hear(self) -> None:
        """End that."""
        _run(*self.within, "nft", "delete", "table", "inet", "deaf")

    def open_loopback(self) -> None:
        """Let a walled host talk to itself: a trainer's TRL and agent do."""
        for chain, device in (("input", "iifname"), ("output", "oifname")):
            _run(*self.within, "nft", "add", "rule", "inet", "wall", chain, device, "lo", "accept")

    def reaches(self, host: str, port: int) -> bool:
        """Whether a TCP connection from here gets any answer: made or refused, not lost."""
        program = (
            "import socket, sys\n"
            f"near = socket.socket(); near.settimeout(0.5)\n"
            f"try: near.connect(({host!r}, {port}))\n"
            "except ConnectionRefusedError: pass\n"
            "except OSError: sys.exit(1)\n"
        )
        done = subprocess.run([*self.within, sys.executable, "-c", program], check=False)
        return done.returncode == 0


@contextmanager
def two_hosts(way_out: int) -> Iterator[tuple[Namespace, Namespace]]:
    """An open host, and a walled one that reaches only the open host's port `way_out`."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"network namespaces need root, and commands that are missing: {missing}")
    hosts = (
        Namespace(f"agrpo-open-{os.getpid()}", OPEN_HOST),
        Namespace(f"agrpo-wall-{os.getpid()}", WALLED_HOST),
    )
    try:
        _join(*hosts)
        _run(*hosts[1].within, "nft", "-f", "-", text=_WALL.format(host=OPEN_HOST, port=way_out))
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def _join(first: Namespace, second: Namespace) -> None:
    try:
        _run("ip", "netns", "add", first.name)
    except AssertionError as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    _run("ip", "netns", "add", second.name)
    peer = ("peer", "name", "cable", "netns", second.name)
    _run("ip", "-n", first.name, "link", "add", "cable", "type", "veth", *peer)
    for host in (first, second):
        _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
        for device in ("lo", "cable"):
            _run("ip", "-n", host.name, "link", "set", device, "up")


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def open_ports(pid: int) -> list[str]:
    """Addresses that anybody listens on in the namespace of process `pid`, loopback aside.

    The kernel's own tables: no port and no protocol is missed, as a scan over the wire might. UDP
    sockets that are bound to no peer count as listening.
    """
    found = []
    for kind, listening in (("tcp", "0A"), ("udp", "07")):
        for file, loopback in ((kind, "0100007F"), (f"{kind}6", f"{'0' * 24}01000000")):
            for row in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
                local, state = row.split()[1], row.split()[3]
                if state == listening and not local.startswith(loopback):
                    found.append(local)
    return found
