"""What must hold the whole time, seen from outside: by what TRL got, and by the bucket's own files.

A completion is right if its signature is the digest of the bytes that were committed as the version
it was asked for, at a time before the answer. TRL says what it asked for and got; the engines say
what they loaded; the bucket says what was committed and when. No agent is asked.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncgrpo_agent.core.adapters import parse_attempt, parse_commit_key, parse_name
from fakes.adapters import adapter_digest
from fakes.processes import open_files

SLACK_S: Final = 0.05  # of clocks that stamp files and lines


class Lines:
    """The whole lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Iterator[dict[str, Any]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                yield json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    version: int
    at: float


@dataclass(slots=True)
class Observer:
    """`look` is called often. `broken` are the sentences that say which invariant broke."""

    record: Path
    run_dir: Path  # the run's folder among the bucket's own files
    planted: Collection[str]  # keys of commits that are not the trainer's
    loads: dict[str, Path]
    broken: list[str] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)  # when each was answered
    failed: list[tuple[float, str]] = field(default_factory=list)
    wrong_bytes: int = 0
    steps: dict[int, float] = field(default_factory=dict)  # when each was first done
    lives: list[str] = field(default_factory=list)
    descriptors: dict[int, list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _lines: Lines = field(init=False)
    _load_lines: dict[str, Lines] = field(init=False)
    _committed: dict[str, Committed] = field(default_factory=dict)  # by the bytes' digest
    _seen: set[Path] = field(default_factory=set)
    _versions: set[tuple[int, int]] = field(default_factory=set)  # attempts' numbers first
    _attempts: dict[str, int] = field(default_factory=dict)  # newest that each engine has loaded

    def __post_init__(self) -> None:
        self._lines = Lines(self.record)
        self._load_lines = {name: Lines(path) for name, path in self.loads.items()}

    def look(self) -> None:
        lines = list(self._lines.read())
        loads = {name: list(found.read()) for name, found in self._load_lines.items()}
        self._look_at_commits()  # after the lines: what they are about was committed before them
        for line in lines:
            self._take(line)
        for name, found in loads.items():
            for line in found:
                self._take_load(name, line["loaded"])

    def sample(self, now: float, pids: Collection[int]) -> None:
        """The open files of some processes."""
        for pid in pids:
            with suppress(OSError):
                self.descriptors[pid].append((now, open_files(pid)))

    # --- the bucket --------------------------------------------------------------------------

    def _look_at_commits(self) -> None:
        for path in (self.run_dir / "commits").rglob("*.toml"):
            key = str(path.relative_to(self.run_dir))
            if path in self._seen or key in self.planted:
                continue
            self._seen.add(path)
            found = parse_commit_key(key)
            assert found is not None, key
            number = parse_attempt(found.attempt).number
            self._versions.add((number, found.version))
            with suppress(FileNotFoundError):  # pruned, as soon as it was seen
                commit = tomllib.loads(path.read_text())
                folder = self.run_dir / commit["files"][0]["key"]
                made = Committed(version=found.version, at=path.stat().st_mtime)
                self._committed[adapter_digest(folder.parent)] = made

    # --- what TRL got ------------------------------------------------------------------------

    def _take(self, line: dict[str, Any]) -> None:
        if "began" in line:
            self.lives.append(line["life"])
        elif "step" in line:
            self.steps.setdefault(line["step"], line["t"])
        elif "failed" in line:
            self.failed.append((line["t"], line["failed"]))
        else:
            self.rollouts.append(line["t"])
            self._judge(line)

    def _judge(self, line: dict[str, Any]) -> None:
        commit = self._committed.get(line["digest"])
        wanted = int(line["name"].rpartition("-v")[2])
        if commit is None:
            self._wrong(line, f"an answer by bytes that nobody committed ({line['digest'][:12]})")
        elif commit.version != wanted or line["model"] != line["name"]:
            self._wrong(line, f"an answer by version {commit.version} as {line['model']}")
        elif commit.at > line["t"] + SLACK_S:
            self._wrong(line, "an answer before the commit")
        elif line["digest"] != line["own"]:
            self._wrong(line, "an answer by another attempt's bytes")

    def _wrong(self, line: dict[str, Any], what: str) -> None:
        self.wrong_bytes += 1
        self.broken.append(f"{what} to {line['name']} of life {line['life']} at {line['t']:.2f}")

    # --- what engines loaded -----------------------------------------------------------------

    def _take_load(self, host: str, name: str) -> None:
        parts = parse_name(name)
        assert parts is not None, name
        number = parse_attempt(parts.attempt).number
        if number < self._attempts.get(host, 0):
            self.broken.append(f"{host} loaded {name} after attempt {self._attempts[host]}")
        if (number, parts.version) not in self._versions:
            self.broken.append(f"{host} loaded {name}, which nobody committed")
        self._attempts[host] = max(number, self._attempts.get(host, 0))
