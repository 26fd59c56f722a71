"""What runs have ended with, as anybody with their bucket sees it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncgrpo_agent.core.commits import Commit
from asyncgrpo_agent.core.finals import parse_final_key
from asyncgrpo_agent.errors import (
    AdapterRefusedError,
    AgentError,
    BucketUnavailableError,
    StoreError,
)
from asyncgrpo_agent.roles.adapter_reader import MAX_TRIED, RunReader
from asyncgrpo_agent.roles.adapter_sources import Results


@dataclass(frozen=True, slots=True)
class ResultReader:
    """Of one run. Without a key signatures are not checked."""

    bucket: Results
    run: str
    public_key: bytes | None

    async def newest(self, attempt: str = "") -> Commit | None:
        """Of one attempt, if it is named. What cannot be read does not hide the next. Raises
        StoreError if none can be."""
        problem: StoreError | None = None
        for key in (await self._keys(attempt))[:MAX_TRIED]:
            try:
                listed = await self.bucket.read_result(
                    key, run=self.run, public_key=self.public_key
                )
            except (AdapterRefusedError, BucketUnavailableError) as error:
                problem = problem or error
            else:
                return listed.commit
        if problem is not None:
            raise problem
        return None

    async def needed(self, attempt: str = "") -> Commit:
        """The same, or why there is none. Raises AgentError."""
        found = await self.newest(attempt)
        if found is not None:
            return found
        reader = RunReader(self.bucket, self.run, self.public_key)
        attempt, versions = await reader.attempt(attempt)
        raise AgentError(
            f"has no result: attempt {attempt} has not ended well, or not yet; its newest version"
            f" is {next(iter(versions))}",
            where=f"run {self.run}",
            fix="Take that one with --version newest, or another attempt with --attempt",
        )

    async def _keys(self, attempt: str) -> list[str]:
        keys = await self.bucket.list_results()
        parts = {key: parse_final_key(key) for key in keys}
        return [key for key, said in parts.items() if said and attempt in ("", said.attempt)]
