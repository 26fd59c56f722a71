"""The network of `scripts/chaos`: each host in a namespace of its own, a router between them.

The calling process moves into the router's namespace. Every connection that a host opens to the
proxy's port is redirected there to a relay of that host, which passes it on to the address that was
dialled; hosts reach nothing else. Nothing comes in to a host but answers, and to the proxy's host
what is for its port.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fakes.relay import Relay

PORT: Final = 7443
_NETWORK: Final = "10.214"
_FIRST_RELAY: Final = 21000
_CLONE_NEWNET: Final = 0x40000000

_WALL: Final = """
table inet wall {{
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    {rule}
  }}
}}
"""
_DEAF: Final = """
table inet deaf_{name} {{
  chain input {{
    type filter hook input priority -200; policy accept;
    iifname "{device}" drop
  }}
}}
"""
_REDIRECT: Final = """
table ip relays {{
  chain prerouting {{
    type nat hook prerouting priority -100;
    {rules}
  }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Netns:
    """One host's network. `number` makes its addresses."""

    name: str
    namespace: str
    number: int
    relay: Relay | None

    @property
    def within(self) -> Sequence[str]:
        """Makes a command run on it. The file systems stay the caller's, mounts to come too."""
        return ("nsenter", f"--net={_path(self.namespace)}")

    @property
    def addresses(self) -> tuple[str, str]:
        """Its own, and one to move to."""
        return f"{_NETWORK}.{self.number}.2", f"{_NETWORK}.{self.number}.3"

    @property
    def router(self) -> str:
        return f"{_NETWORK}.{self.number}.1"

    def processes(self) -> dict[int, list[str]]:
        """Who runs there: process ids and command lines."""
        home, found = _path(self.namespace).stat().st_ino, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if os.stat(entry / "ns/net").st_ino == home:
                        line = (entry / "cmdline").read_bytes().decode(errors="replace")
                        found[int(entry.name)] = line.split("\0")[:-1]
        return {pid: line for pid, line in found.items() if line}  # zombies have none

    def deafen(self, *, up: bool = False, down: bool = False) -> None:
        """Lose every packet that it sends (`up`), that it should receive (`down`), or both."""
        if up:
            _nft((), _DEAF.format(name=self.name, device=self.name))
        if down:
            _nft(self.within, _DEAF.format(name=self.name, device="cable"))

    def hear(self) -> None:
        """End that."""
        for within in ((), self.within):
            command = [*within, "nft", "delete", "table", "inet", f"deaf_{self.name}"]
            subprocess.run(command, capture_output=True, check=False)

    def move(self, before: str, after: str) -> None:
        """Give up one address for another; the way out goes with the first."""
        device = ("dev", "cable")
        _run(*self.within, "ip", "addr", "del", f"{before}/24", *device)
        _run(*self.within, "ip", "addr", "add", f"{after}/24", *device)
        _run(*self.within, "ip", "route", "replace", "default", "via", self.router)


@contextmanager
def network(listener: str, diallers: Sequence[str]) -> Iterator[dict[str, Netns]]:
    """All hosts by name; `listener` is the one that may be dialled."""
    router = f"chaos-{os.getpid()}"
    names = [listener, *diallers]
    with ExitStack() as stack:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(_enter, home)
        stack.enter_context(_namespace(router))
        _enter(os.open(_path(router), os.O_RDONLY))
        hosts = {}
        for number, name in enumerate(names, start=1):
            namespace = stack.enter_context(_namespace(f"{router}-{name}"))
            _join(name, namespace, number)
            port = _FIRST_RELAY + number
            relay = None if name == listener else Relay("", listen=("0.0.0.0", port))
            hosts[name] = Netns(name=name, namespace=namespace, number=number, relay=relay)
            rule = f"tcp dport {PORT} accept" if name == listener else ""
            _nft(hosts[name].within, _WALL.format(rule=rule))
        _run("ip", "link", "set", "lo", "up")
        rules = [
            f'iifname "{host.name}" tcp dport {PORT} redirect to :{_FIRST_RELAY + host.number}'
            for host in hosts.values()
            if host.relay
        ]
        _nft((), _REDIRECT.format(rules="\n    ".join(rules)))
        for host in hosts.values():
            if host.relay:
                stack.enter_context(host.relay)
        yield hosts


def _path(namespace: str) -> Path:
    return Path("/run/netns") / namespace


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _enter(namespace: int) -> None:
    """This thread, and those that it starts from now on. Closes the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


def _join(name: str, namespace: str, number: int) -> None:
    """A cable between the router and a host."""
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", namespace)
    _run("ip", "addr", "add", f"{_NETWORK}.{number}.1/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    inside = ("ip", "-n", namespace)
    _run(*inside, "addr", "add", f"{_NETWORK}.{number}.2/24", "dev", "cable")
    for device in ("lo", "cable"):
        _run(*inside, "link", "set", device, "up")
    _run(*inside, "route", "add", "default", "via", f"{_NETWORK}.{number}.1")


def _nft(within: Sequence[str], text: str) -> None:
    _run(*within, "nft", "-f", "-", text=text)


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
