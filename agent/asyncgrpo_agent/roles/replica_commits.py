"""The commits that a replica looks for: listed, read, checked once, remembered for a while.

A listing of the bucket is the truth about what exists. Commits that were announced and do not show
yet are awaited; one that can never be loaded is refused for good. What is kept is bounded, whatever
the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from asyncgrpo_agent.core import adapters as decide
from asyncgrpo_agent.core.adapters import Listed
from asyncgrpo_agent.core.arrivals import Arrivals
from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost

log = Log(__name__)

KEPT_COMMITS: Final = 64


@dataclass(slots=True)
class Commits:
    """Of one attempt at a time, by key."""

    join: Join
    base_model_digest: Callable[[], str]
    """Of the model that adapters have to be for; "" if that cannot be told from weights."""
    arrivals: Arrivals
    known: dict[str, Commit] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)  # announced key -> since when

    def expect(self, key: str, now: float) -> None:
        """It was announced."""
        self.awaited.setdefault(key, now)

    def forget(self) -> None:
        """There is another attempt."""
        self.known.clear()
        self.awaited.clear()

    def awaited_s(self, now: float) -> list[float]:
        """For how long each that was announced and does not show yet has been awaited."""
        return [now - since for since in self.awaited.values()]

    def remembered(self) -> list[Listed]:
        """What was seen before, for when the bucket cannot be asked."""
        return [(commit.adapter, key) for key, commit in self.known.items()]

    async def look(
        self, bucket: BucketHost, attempt: str, live: Sequence[str], high_water: tuple[int, int]
    ) -> list[Listed]:
        """The commits of the attempt that matter: the newest, and the live ones."""
        wanted = {p.version for name in live if (p := decide.parse_name(name)) is not None}
        # Those that were read before may be in the folder before the newest: a listing saved.
        seen = [row for row in self.remembered() if row[0].version in wanted]
        unseen = wanted - {adapter.version for adapter, _ in seen}
        same = decide.parse_attempt(attempt).number == high_water[0]
        lowest = min(unseen, default=max(wanted, default=high_water[1] if same else 0))
        keys = await bucket.list_commits(attempt, lowest - 1)
        rows: list[Listed] = []
        for key in keys:  # newest first; one that cannot be had does not hide the next
            parts = decide.parse_commit_key(key)
            is_needed = all(self.arrivals.has_failed(adapter.name) for adapter, _ in rows)
            if is_needed or (parts is not None and parts.version in wanted):
                commit = await self._read(bucket, key)
                if commit is not None:
                    rows.append((commit.adapter, key))
        self.awaited = {k: at for k, at in self.awaited.items() if self._is_awaited(k, wanted)}
        return rows + [row for row in seen if row[1] not in keys]

    def _is_awaited(self, key: str, wanted: set[int]) -> bool:
        """Whether this announced commit has still to show in the bucket."""
        parts = decide.parse_commit_key(key)
        is_wanted = parts is not None and parts.version in wanted
        return is_wanted and key not in self.known and key not in self.arrivals.refused

    async def _read(self, bucket: BucketHost, key: str) -> Commit | None:
        if key in self.arrivals.refused:
            return None
        if key not in self.known:
            try:
                listed = await bucket.read_commit(
                    key, run=self.join.run, public_key=self.join.run_public_key
                )
                commit = listed.commit
                self._check_base_model(commit, key)
            except AdapterRefusedError as error:
                self.refuse(key, str(error))
                return None
            except BucketUnavailableError as error:  # it may still be on its way
                log.info("commit.unreadable", key=key, reason=str(error))
                return None
            self.arrivals.notice(commit.adapter.name, trio.current_time())
            self.arrivals.reach("visible", commit.adapter.name, trio.current_time())
            self.known[key] = commit
            for old in list(self.known)[:-KEPT_COMMITS]:
                del self.known[old]
        return self.known[key]

    def _check_base_model(self, commit: Commit, key: str) -> None:
        if self.base_model_digest() not in ("", commit.base_model_digest):
            raise AdapterRefusedError(
                "was trained on another base model than this replica serves",
                where=key,
                fix="Give model.path the same model on the trainer and on every replica",
            )

    def refuse(self, key: str, reason: str) -> None:
        """It is never tried again."""
        log.error("adapter.refused", key=key, reason=reason)
        self.arrivals.refused[key] = reason
