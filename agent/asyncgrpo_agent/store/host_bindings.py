"""Which host key each replica name of each run belongs to: `<state>/proxy/hosts.json`.

The proxy decides by what is in memory; the file lets a restarted proxy know the same. It is written
when a name is bound, and for when a host was last seen at most once a day. Names that no host has
joined under for a month are given up when the proxy starts, or when room is needed; a live one
never is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.store import private_files

MAX_NAMES: Final = 4096  # of one run: a stolen token must not fill the disk
UNSEEN_S: Final = 30 * 86400.0
SEEN_EVERY_S: Final = 86400.0


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is the public key in hex; times are seconds since 1970."""

    key: str
    first_seen_unix_s: float
    last_seen_unix_s: float


class HostBindings:
    """All bindings of one proxy, by run and name. Raises ConfigError when made of a bad file."""

    def __init__(self, state_dir: Path, now_unix_s: float) -> None:
        self.path = state_dir / "proxy" / "hosts.json"
        self.unsaved = False
        self._runs = _read(self.path)
        for run in list(self._runs):
            self._forget(run, (), now_unix_s)
            if not self._runs[run]:
                del self._runs[run]

    def keys(self, run: str) -> dict[str, str]:
        """The key that each name of the run belongs to."""
        return {name: binding.key for name, binding in self._runs.get(run, {}).items()}

    def bind(self, run: str, name: str, key: str, live: Collection[str], now_unix_s: float) -> bool:
        """Give a name that nobody has to `key`; False if the run has too many names."""
        bound = self._runs.setdefault(run, {})
        if len(bound) >= MAX_NAMES:
            self._forget(run, live, now_unix_s)
        if len(bound) >= MAX_NAMES:
            return False
        bound[name] = Binding(key=key, first_seen_unix_s=now_unix_s, last_seen_unix_s=now_unix_s)
        self.unsaved = True
        return True

    def seen(self, run: str, names: Iterable[str], now_unix_s: float) -> None:
        """The hosts of these names are here."""
        bound = self._runs.get(run, {})
        for name in names:
            binding = bound.get(name)
            if binding is not None and now_unix_s - binding.last_seen_unix_s >= SEEN_EVERY_S:
                bound[name] = msgspec.structs.replace(binding, last_seen_unix_s=now_unix_s)
                self.unsaved = True

    def take_unsaved(self) -> bytes:
        """What the file should hold; for `save`, which may run in a thread."""
        self.unsaved = False
        return msgspec.json.format(msgspec.json.encode(self._runs), indent=1) + b"\n"

    def save(self, content: bytes) -> None:
        """Raises OSError."""
        with private_files.locked(private_files.private_folder(self.path.parent)):
            private_files.write(self.path, content)

    def _forget(self, run: str, live: Collection[str], now_unix_s: float) -> None:
        bound = self._runs[run]
        for name, binding in list(bound.items()):
            if now_unix_s - binding.last_seen_unix_s >= UNSEEN_S and name not in live:
                del bound[name]
                self.unsaved = True


def _read(path: Path) -> dict[str, dict[str, Binding]]:
    fix = "Restore it from a backup, or delete it: names then belong to the hosts that join first"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Binding]])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"does not parse: {error}", where=str(path), fix=fix) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error
