"""A base model from its hub, loaded by the engine's Python, however long that takes.

A hub or a network that is away is waited for; what only the user can mend ends the agent. What was
loaded once is used again without asking anybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Final

import trio
from msgspec import structs

from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.backoff import Backoff
from asyncgrpo_agent.core.run_record import is_commit
from asyncgrpo_agent.errors import ChildExitedError
from asyncgrpo_agent.logs import Log
from asyncgrpo_agent.procs import child, trl
from asyncgrpo_agent.procs.model_download import (
    Loaded,
    Progress,
    Reader,
    download_command,
    hub_home,
)
from asyncgrpo_agent.store import model_downloads, model_packs
from asyncgrpo_agent.store.model_downloads import Download
from asyncgrpo_agent.store.models import model_digest

log = Log(__name__)

MAX_PAUSE_S: Final = 60.0
LOG_EVERY_S: Final = 30.0

Tell = Callable[[str], None]
"""Takes why the model is not there yet, for whoever looks on."""


async def have_model(
    config: Config, revision: str, tell: Tell, *, tries: int | None = None
) -> Loaded:
    """The model `config.model.id` at `revision`, whole on this host.

    Raises ConfigError for what waiting does not mend, and ChildExitedError after `tries`.
    """
    told = _Told(config, revision, tell)
    if is_commit(revision) and (before := told.before) is not None and before.is_here:
        return Loaded(commit=before.commit, folder=before.folder, files=before.files)
    backoff = Backoff(SystemRandom(), cap_s=MAX_PAUSE_S)
    failed = 0
    while True:
        try:
            return await _load(config, revision, told)
        except ChildExitedError as error:
            failed += 1
            if failed == tries:
                raise
            pause_s = backoff.next_delay_s()
            told.stopped(f"{error.what}; it is tried again in {pause_s:.0f} s")
            log.warning("model.unloaded", model=config.model.id, reason=error.what, in_s=pause_s)
            await trio.sleep(pause_s)


async def checked_digest(config: Config, folder: str, tell: Tell) -> str:
    """What identifies the model in `folder`, if that is no pack, or a whole one.

    Raises ConfigError.
    """
    if model_packs.is_pack(Path(folder)):
        tell(f"checking every file of {Path(folder).name}")
        stamp = config.state_dir / "models"
        await trio.to_thread.run_sync(
            model_packs.verify, Path(folder), stamp, abandon_on_cancel=True
        )
    return await trio.to_thread.run_sync(model_digest, Path(folder))


def with_model(config: Config, loaded: Loaded, name: str) -> Config:
    """With the folder that it lies in, and the commit that it is."""
    model = structs.replace(
        config.model,
        path=loaded.folder,
        revision=loaded.commit,
        name=config.model.name or name,
    )
    return dataclasses.replace(config, model=model)


async def _load(config: Config, revision: str, told: _Told) -> Loaded:
    """One try. Raises ConfigError, ChildExitedError."""
    reader = Reader()

    def heard(line: str) -> None:
        if (progress := reader.take(line)) is not None:
            told.progress(progress)

    argv, additions = download_command(
        config.engine.python,
        config.model.id,
        revision,
        trust_remote_code=config.model.trust_remote_code,
        scratch=config.state_dir / "models",
    )
    home = {} if child.inherited({}).get("HF_HOME") else hub_home(Path.home(), config.state_dir)
    log_file = config.log_dir / "model-download.log"
    settings = {**additions, **home, **config.engine.env}
    env = child.inherited(settings, "server", caches=str(config.cache_dir))
    async with child.started(
        "model-download", argv, env=env, on_line=heard, log_file=log_file
    ) as process:
        code = await process.wait()
        tail = process.tail()
    if (refused := trl.config_error(code, tail)) is not None:
        told.stopped(refused.what)
        raise refused
    if code == 0 and reader.loaded is not None:
        told.loaded(reader.loaded)
        return reader.loaded
    problems = trl.problems_in(tail)
    what = problems[0].what if problems else f"the download ended with exit code {code}"
    raise ChildExitedError(
        f"{config.model.id} is not loaded: {what}",
        returncode=code,
        tail=tail,
        where=str(log_file),
        fix=problems[0].fix if problems else f"Its last lines:\n{tail}",
    )


class _Told:
    """How far one download has come: for those who look on, for the log, and for doctor."""

    def __init__(self, config: Config, revision: str, tell: Tell) -> None:
        self._id = config.model.id
        self._path = model_downloads.path_of(config.state_dir, self._id, revision)
        self._tell = tell
        self._logged_at = float("-inf")
        self.before = model_downloads.read(self._path)
        self._now = Download(id=self._id)
        tell(f"loading {self._id}")

    def progress(self, said: Progress) -> None:
        now = trio.current_time()
        text = f"loading {self._id}: {model_packs.amount(said.bytes, said.of_bytes)}"
        self._tell(text)
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.info("model.loading", model=self._id, bytes=said.bytes, of_bytes=said.of_bytes)
        self._keep(
            Download(id=self._id, commit=said.commit, bytes=said.bytes, of_bytes=said.of_bytes)
        )

    def stopped(self, reason: str) -> None:
        self._tell(reason)
        self._keep(structs.replace(self._now, reason=reason))

    def loaded(self, model: Loaded) -> None:
        size = sum(model.files.values())
        log.info("model.loaded", model=self._id, commit=model.commit, bytes=size)
        self._keep(
            Download(
                id=self._id,
                commit=model.commit,
                folder=model.folder,
                files=model.files,
                bytes=size,
                of_bytes=size,
            )
        )

    def _keep(self, download: Download) -> None:
        self._now = download
        try:
            model_downloads.write(self._path, download)
        except OSError as error:  # the next start asks the hub once more
            log.warning("model.unnoted", file=str(self._path), reason=error.strerror)
