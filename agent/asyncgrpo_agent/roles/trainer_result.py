"""The run's result on its way into the bucket: the adapter that training has ended with.

It is copied once TRL has ended by itself, and once more by a later start of the ended run if that
did not come to its end. What is there already, byte for byte, is left as it is. Without it the run
is not over for its user, so a bucket that cannot be written is an error here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapters import adapter_digest
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.lora import VLLM_RANKS
from asyncgrpo_agent.errors import AdapterRefusedError, BucketUnavailableError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_adapters import Record
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store.inspection import inspect_files

log = Log(__name__)


@dataclass(slots=True)
class RunResult:
    """One per trainer. `step` is the last of training, as whoever hears of it says."""

    config: Config
    join: Join
    link: TrainerLink
    bucket: BucketHost
    turns: Turns
    base_model_digest: str
    record: Record
    rng: Random
    step: int = 0

    @property
    def folder(self) -> Path:
        """Where TRL leaves it."""
        return self.config.output_dir / self.join.run / "final"

    async def publish(self) -> None:
        """Tries again for `trainer.mirror_s`. Raises BucketUnavailableError."""
        if not await trio.Path(self.folder).is_dir():
            log.warning("result.missing", path=self.folder, reason="training saved none")
            return
        backoff = Backoff(self.rng)
        deadline = trio.current_time() + self.config.trainer.mirror_s
        while True:
            try:
                await self._publish_once()
            except BucketUnavailableError as error:
                delay_s = backoff.next_delay_s()
                if trio.current_time() + delay_s > deadline:
                    raise self._unpublished(error) from error
                log.warning("result.unpublished", reason=str(error), in_s=delay_s)
            else:
                return
            await trio.sleep(delay_s)

    async def _publish_once(self) -> None:
        files = await trio.to_thread.run_sync(inspect_files, self.folder)
        digest = adapter_digest({file.name: file.sha256 for file in files})
        if await self._is_there(digest):
            return
        if not self.link.attempt:
            await self.link.registered()
        private_key = self.join.run_private_key
        assert private_key is not None, "checked when the join was loaded"
        publish = partial(
            self.bucket.publish,
            self.folder,
            run=self.join.run,
            attempt=self.link.attempt,
            version=self.step,
            base_model=self.config.model_name,
            base_model_digest=self.base_model_digest,
            private_key=private_key,
            live=[],
            now_unix_s=time.time(),  # noqa: TID251 - a role reads the clock
            max_rank=max(VLLM_RANKS),
            is_result=True,
        )
        with self.turns.publishing():
            written = await publish()
        fields = {"step": self.step, "folder": written.folder, "bytes": written.total_bytes}
        log.info("result.published", **fields)
        self.record("result", key=written.commit_key, **fields)

    async def _is_there(self, digest: str) -> bool:
        """One that cannot be read counts for nothing: there will be another one."""
        for key in (await self.bucket.list_results())[:1]:
            try:
                listed = await self.bucket.read_result(
                    key, run=self.join.run, public_key=self.join.run_public_key
                )
            except (AdapterRefusedError, BucketUnavailableError) as error:
                log.warning("result.refused", key=key, reason=str(error))
                return False
            return listed.adapter.digest == digest
        return False

    def _unpublished(self, error: BucketUnavailableError) -> BucketUnavailableError:
        return BucketUnavailableError(
            f"the run has ended and its result is not in the bucket: {error.what}",
            where=error.where,
            fix=f"It is whole in {self.folder}; start the trainer again to copy it. {error.fix}",
        )
