"""A trainer's start: where the run goes on, with everything for it on this host's disk.

The newest checkpoint of the run, on this host or in the bucket, ends up in TRL's output folder as
`checkpoint-N`, whole. A corrupt one in the bucket gives way to the one before, with a warning; a
bucket that does not answer ends the start, for to begin anew would throw the run away. What lies
here of a branch that nobody follows is set aside, never removed.

Changed settings are listed. A changed model or LoRA shape is a ConfigError: it needs a new name.
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import trio

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core import resumption
from asyncgrpo_agent.core.checkpoints import Checkpoint, CheckpointKey
from asyncgrpo_agent.core.join import Join
from asyncgrpo_agent.core.resumption import OnThisHost
from asyncgrpo_agent.errors import AdapterRefusedError, ConfigError, StoreError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.roles.trainer_job import run_folder
from asyncgrpo_agent.store import last_start, saved_checkpoints
from asyncgrpo_agent.store.last_start import LastStart

log = Log(__name__)

TASK_KEYS: Final = (
    *("dataset", "dataset_config", "dataset_split"),  # the split is "train" unless it is given
    *("rewards", "reward_weights", "tools", "environment_factory", "environments", "init_from"),
)
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class Checkpoints(Protocol):
    """What a bucket offers."""

    async def list_checkpoints(self) -> dict[str, list[CheckpointKey]]: ...
    async def read_checkpoint(
        self, key: CheckpointKey, *, run: str, public_key: bytes
    ) -> Checkpoint: ...
    async def restore_checkpoint(self, checkpoint: Checkpoint, target_dir: Path) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where training goes on; step 0 and no folder for a new run."""

    step: int = 0
    folder: Path | None = None
    source: str = "new"
    """ "host", "bucket", or "new"."""
    is_mirrored: bool = True
    """The bucket has it."""
    finished: bool = False
    """Nothing is left to be trained."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Of one start of one run."""

    config: Config
    join: Join
    bucket: Checkpoints
    base_model_digest: str

    @property
    def output(self) -> Path:
        return self.config.output_dir / self.join.run

    async def prepare(self) -> Resumed:
        """ConfigError: the run cannot go on with these settings. StoreError: not now."""
        began = await trio.to_thread.run_sync(last_start.read, self._state_dir)
        local = await self._on_this_host(began)
        listed = await self.bucket.list_checkpoints()
        mirrored = {key.step for keys in listed.values() for key in keys}
        for candidate in resumption.candidates(local, listed):
            if isinstance(candidate, OnThisHost):
                self._check(began.base_model_digest, began.settings, candidate.step)
                return await self._resumed(
                    candidate.step, "host", is_mirrored=candidate.step in mirrored
                )
            if await self._restored(candidate):
                return await self._resumed(candidate.step, "bucket", is_mirrored=True)
        await self._set_aside(above=-1)
        return Resumed()

    async def note_start(self, attempt_number: int) -> None:
        """Before TRL starts."""
        start = LastStart(
            attempt_number=attempt_number,
            base_model_digest=self.base_model_digest,
            settings=settings_of(self.config),
        )
        await trio.to_thread.run_sync(last_start.write, self._state_dir, start)

    @property
    def _state_dir(self) -> Path:
        return run_folder(self.config.state_dir, self.join.run)

    async def _on_this_host(self, began: LastStart) -> OnThisHost | None:
        find = partial(saved_checkpoints.newest, self.output, after_step=-1, known={})
        found = await trio.to_thread.run_sync(find)
        if found is None:
            return None
        return OnThisHost(step=found.step, attempt_number=began.attempt_number)

    async def _resumed(self, step: int, source: str, *, is_mirrored: bool) -> Resumed:
        folder = self.output / saved_checkpoints.folder_name(step)
        await self._set_aside(above=step)
        finished = resumption.is_finished(step, self.config.train.passthrough)
        if finished:
            await trio.to_thread.run_sync(_make_final, folder, self.output / "final")
        log.info("run.resumed", step=step, source=source, finished=finished)
        return Resumed(
            step=step, folder=folder, source=source, is_mirrored=is_mirrored, finished=finished
        )

    # --- the bucket's ---------------------------------------------------------------------

    async def _restored(self, key: CheckpointKey) -> bool:
        """False: it is corrupt, or was pruned meanwhile."""
        try:
            checkpoint = await self.bucket.read_checkpoint(
                key, run=self.join.run, public_key=self.join.run_public_key
            )
        except AdapterRefusedError as error:
            log.warning("checkpoint.refused", key=key.key, reason=str(error))
            return False
        self._check(checkpoint.base_model_digest, checkpoint.settings, checkpoint.step)
        beside = self.output / f".restored-{key.attempt}-{key.step}"
        await trio.to_thread.run_sync(partial(shutil.rmtree, beside, ignore_errors=True))
        try:
            await self.bucket.restore_checkpoint(checkpoint, beside)
        except AdapterRefusedError as error:
            log.warning("checkpoint.refused", key=key.key, reason=str(error))
            return False
        await self._set_aside(above=key.step - 1)  # not before: it may be the next best
        folder = self.output / saved_checkpoints.folder_name(key.step)
        await trio.to_thread.run_sync(_rename, beside, folder)
        return True

    def _check(self, base_model_digest: str, before: dict[str, str], step: int) -> None:
        where = f"run {self.join.run!r}, whose newest checkpoint is of step {step}"
        fix = "Restore the setting, or train under a new name: asyncgrpo-agent run create NAME"
        if base_model_digest not in ("", self.base_model_digest):
            raise ConfigError("model.path now holds another model", where=where, fix=fix)
        changed = resumption.changes(before, settings_of(self.config))
        unfit = [str(change) for change in changed if not change.fits]
        if unfit:
            raise ConfigError(
                f"the adapter's shape or scale has changed: {'; '.join(unfit)}",
                where=where,
                fix=fix,
            )
        for change in changed:
            log.info("run.changed", key=change.key, before=change.before, now=change.now)

    # --- what lies here ------------------------------------------------------------------

    async def _set_aside(self, *, above: int) -> None:
        """Rename the checkpoint folders of later steps, torn ones included."""
        found = await trio.to_thread.run_sync(saved_checkpoints.on_disk, self.output)
        for step, folder in found.items():
            if step > above:
                aside = await trio.to_thread.run_sync(_rename_aside, folder)
                log.warning("checkpoint.set_aside", step=step, path=aside)


def _rename_aside(folder: Path) -> Path:
    """To a name that neither TRL nor the agent takes for a checkpoint."""
    target = Path(tempfile.mkdtemp(prefix=f"abandoned-{folder.name}-", dir=folder.parent))
    _rename(folder, target)
    return target


def _rename(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        raise _local_error(error, folder) from error


def _make_final(checkpoint: Path, final: Path) -> None:
    """The adapter of a run's last checkpoint as its result, unless TRL has saved the same."""
    if final.exists():
        if all(_is_same(checkpoint / name, final / name) for name in ADAPTER_FILES):
            return
        _rename_aside(final)  # of a shorter run
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-final-", dir=final.parent))
    try:
        for name in ADAPTER_FILES:
            shutil.copy2(checkpoint / name, temporary / name)
        temporary.chmod(0o755)
        temporary.rename(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _local_error(error, final) from error


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _local_error(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"cannot prepare the output folder: {error.strerror}",
        where=str(path),
        fix="Check free space and permissions of train.output_dir",
    )


def settings_of(config: Config) -> dict[str, str]:
    """What checkpoints are compared by, and carry."""
    train = config.train
    return resumption.settings(
        script=train.script,
        script_args=train.script_args,
        task={key: value for key in TASK_KEYS if (value := getattr(train, key)) != "train"},
        passthrough=train.passthrough,
        lora=train.lora,
    )
