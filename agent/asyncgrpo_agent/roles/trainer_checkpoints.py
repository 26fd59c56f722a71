"""TRL's checkpoints on their way into the bucket, so that a run outlives its trainer's host.

While TRL runs, the newest whole checkpoint is copied in the background; those that a newer one has
overtaken are skipped. The copy is made in calls of `SLICE_S`, and adapters go between them: what a
publication waits for is one such call, and the upload of one file where a mount does that at once.
When TRL has ended, by itself or by a signal, the last one is copied too, for as long as `mirror_s`.

Checkpoints that earlier starts left on this host are not this attempt's, and stay where they are;
but for the one that this attempt goes on from, if the bucket lacks it.
Nothing here is an error of the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.checkpoints import plan_checkpoint_prune
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.errors import AdapterRefusedError, DeletionForbiddenError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.bucket_host import BucketHost
from asyncgrpo_agent.roles.trainer_adapters import Record
from asyncgrpo_agent.roles.trainer_link import TrainerLink
from asyncgrpo_agent.roles.trainer_turns import Turns
from asyncgrpo_agent.store import saved_checkpoints
from asyncgrpo_agent.store.checkpoints import Looks, PublishedCheckpoint, SavedCheckpoint
from asyncgrpo_agent.store.mount_calls import CheckpointProgress
from asyncgrpo_agent.store.saved_checkpoints import LocalCheckpoint

log = Log(__name__)

POLL_S: Final = 2.0
QUIET_S: Final = 5.0  # without a change, unless TRL is known to be further on
SLICE_S: Final = 0.5
RETRY_S: Final = 60.0


@dataclass(slots=True)
class Checkpoints:
    """One per trainer. `trl_step` is raised by whoever hears of TRL's steps."""

    config: Config
    join: Join
    link: TrainerLink
    bucket: BucketHost
    turns: Turns
    base_model_digest: str
    record: Record
    settings: dict[str, str] = field(default_factory=dict)
    trl_step: int = 0
    _mirrored_step: int = -1
    _known: dict[int, Looks] = field(default_factory=dict)  # not to be copied, as they are
    _seen: LocalCheckpoint | None = None
    _seen_at: float = 0.0
    _copying: LocalCheckpoint | None = None
    _may_delete: bool = True
    _is_pruned: bool = True  # since the last copy
    _ending: bool = False
    _running: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def newest_seen(self) -> tuple[int, float] | None:
        """Step and first sight (trio clock) of the newest one on this host."""
        return None if self._seen is None else (self._seen.step, self._seen_at)

    @property
    def folder(self) -> Path:
        return self.config.output_dir / self.join.run

    def leave_earlier_ones(self, *, but: int | None = None) -> None:
        """Before TRL starts: what is there now was made by another attempt. `but`: a step."""
        found = saved_checkpoints.on_disk(self.folder)
        self._known = {
            step: saved_checkpoints.looks_of(folder)
            for step, folder in found.items()
            if step != but
        }

    async def run(self) -> None:
        """For ever, until `finish`."""
        if not self.config.trainer.keep_checkpoints:
            return
        with self._running:
            while True:
                await trio.sleep(POLL_S)
                found = await self._newest_still()
                if found is not None and not await self._mirror(found):
                    await trio.sleep(RETRY_S)

    async def finish(self) -> None:
        """When TRL has ended. Whatever cancels the caller has to wait, `mirror_s` at most."""
        if not (self.config.trainer.keep_checkpoints and self.config.trainer.mirror_s):
            return
        self._ending = True
        self._running.cancel()
        with trio.move_on_after(self.config.trainer.mirror_s, shield=True) as limit:
            found = await self._newest()
            if found is not None:
                await self._mirror(found)
            if not self._is_pruned:
                await self._prune()
        if limit.cancelled_caught:
            log.warning("checkpoint.unmirrored", reason="trainer.mirror_s is over")

    async def _newest_still(self) -> LocalCheckpoint | None:
        """One that TRL has left behind will do: a run that saves as often as this looks would
        otherwise show a newest one that is still written to at each look."""
        found = await self._newest()
        if found is None or self._is_still(found):
            return found
        return await self._newest(below_step=self.trl_step)

    async def _newest(self, below_step: int | None = None) -> LocalCheckpoint | None:
        find = partial(
            saved_checkpoints.newest,
            self.folder,
            after_step=self._mirrored_step,
            known=self._known,
            below_step=below_step,
        )
        try:
            return await trio.to_thread.run_sync(find, abandon_on_cancel=True)
        except OSError as error:
            log.warning("checkpoint.unseen", path=self.folder, error=error.strerror)
            return None

    def _is_still(self, found: LocalCheckpoint) -> bool:
        now = trio.current_time()
        if found != self._seen:
            self._seen, self._seen_at = found, now
        return self.trl_step > found.step or now - self._seen_at >= QUIET_S

    # --- copying --------------------------------------------------------------------------

    async def _mirror(self, found: LocalCheckpoint) -> bool:
        """False: the bucket failed, so there is no hurry to try again."""
        began = trio.current_time()
        try:
            published = await self._publish(found)
        except AdapterRefusedError as error:  # one that changed has other looks the next time
            self._known[found.step] = found.looks
            log.warning("checkpoint.refused", step=found.step, reason=str(error))
            return True
        except StoreError as error:
            log.warning("checkpoint.unmirrored", step=found.step, reason=str(error))
            return False
        self._mirrored_step, self._is_pruned = found.step, False
        seconds = trio.current_time() - began
        fields = {"step": found.step, "bytes": published.total_bytes, "seconds": seconds}
        log.info("checkpoint.mirrored", **fields)
        self.record("checkpoint", key=published.key, phases_s=published.phases_s, **fields)
        await self._prune()
        return True

    async def _publish(self, found: LocalCheckpoint) -> PublishedCheckpoint:
        """A call that is cut may cost the worker and all that it has copied, so `finish` lets the
        current one end; its own are bounded by `mirror_s`."""
        progress = await self._begin(found)
        while progress.published is None:
            await self.turns.upkeep()
            with trio.CancelScope(shield=not self._ending):
                progress = await self.bucket.continue_checkpoint(found.step, SLICE_S)
        self._copying = None
        return progress.published

    async def _begin(self, found: LocalCheckpoint) -> CheckpointProgress:
        """From the start, unless `finish` came between."""
        await self.turns.upkeep()
        if self._copying == found:
            try:
                return await self.bucket.continue_checkpoint(found.step, SLICE_S)
            except StoreError as error:
                log.info("checkpoint.begun_again", step=found.step, reason=str(error))
        self._copying = found
        with trio.CancelScope(shield=not self._ending):
            progress = await self.bucket.publish_checkpoint(self._saved(found), SLICE_S)
        return progress  # noqa: RET504 - for mypy a scope may swallow what would return

    def _saved(self, found: LocalCheckpoint) -> SavedCheckpoint:
        private_key = self.join.run_private_key
        assert private_key is not None, "checked when the join was loaded"
        return SavedCheckpoint(
            local_dir=found.folder,
            run=self.join.run,
            attempt=self.link.attempt,
            step=found.step,
            base_model=self.config.model_name,
            base_model_digest=self.base_model_digest,
            private_key=private_key,
            now_unix_s=time.time(),  # noqa: TID251 - a role reads the clock
            settings=self.settings,
        )

    # --- removing -------------------------------------------------------------------------

    async def _prune(self) -> None:
        if not (self.config.bucket.may_prune and self._may_delete):
            return
        try:
            await self._remove_old()
        except DeletionForbiddenError as error:
            self._may_delete = False
            log.warning("checkpoints.unprunable", reason=str(error))
        except StoreError as error:
            log.warning("checkpoints.unpruned", reason=str(error))

    async def _remove_old(self) -> None:
        await self.turns.upkeep()
        listed = await self.bucket.list_checkpoints()
        await self.turns.upkeep()
        torn = await self.bucket.list_torn_checkpoints()
        keep = self.config.trainer.keep_checkpoints
        for key in plan_checkpoint_prune(self.link.attempt, listed, torn, keep=keep):
            await self.turns.upkeep()
            objects = await self.bucket.prune_checkpoint(key)
            log.info("checkpoint.pruned", key=key.key, objects=objects)
        self._is_pruned = True
