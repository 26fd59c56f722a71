"""`model pack`, `model verify`: a base model as a folder for hosts without a hub."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from asyncgrpo_agent.config import host, sources
from asyncgrpo_agent.config.kinds import is_hub_name
from asyncgrpo_agent.config.sections import Config, Model
from asyncgrpo_agent.core.run_record import DEFAULT_REVISION
from asyncgrpo_agent.errors import ConfigError, UsageError
from asyncgrpo_agent.flags import Parser, act, add_config_flags, settings_of
from asyncgrpo_agent.store import model_packs
from asyncgrpo_agent.store.models import model_digest

TRIES: Final = 5
_PACK: Final = """\
Write a base model as a folder that any host can use as model.path, and check whenever it does.

MODEL is OWNER/NAME of a model hub, which the engine's Python loads (HF_TOKEN, HF_HOME and
HF_ENDPOINT count), or a folder that holds a model. FOLDER defaults to NAME here; keep its name, by
which the run knows the model. It is written whole or not at all, with SHA256SUMS of every file.
"""
_VERIFY: Final = (
    "Check every byte of a folder that `model pack` has written. Exit code 78 if any is wrong."
)


def run(words: Sequence[str]) -> tuple[str, str]:
    """Text to write, and where to."""
    return act(
        "model", "Base models for hosts without a hub.", {"pack": _pack, "verify": _verify}, words
    )


def _pack(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser("model pack", "model pack MODEL [FOLDER] [--model-revision REV] [flags]", _PACK)
    parser.add_argument("model", metavar="MODEL", help="OWNER/NAME, or a folder")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="the pack; not there yet")
    add_config_flags(parser, only=("--model-revision", "--engine-python", "--state-dir"))
    options = parser.parse_args(list(words))
    source = Path(options.model)
    target = Path(options.folder or source.name).absolute()
    if target.exists():
        raise ConfigError("is there already", where=str(target), fix="Give a folder that is not")
    if source.is_dir():
        model_digest(source)  # it is a model that engines can read
        made_from, names = model_packs.About(), model_packs.files_of(source)
    elif is_hub_name(options.model):
        settings = [one for one in settings_of(options) if one.path != "model.revision"]
        revision = getattr(options, "model.revision") or DEFAULT_REVISION
        source, made_from, names = _loaded(options.model, revision, options.config, settings)
    else:
        raise UsageError(
            f"{options.model} is neither a folder nor OWNER/NAME of a model hub",
            fix="Try `asyncgrpo-agent model pack --help`",
        )
    size = model_packs.write(source, names, target, made_from)
    commit = f", commit {made_from.commit}" if made_from.commit else ""
    return f"{target}: {len(names)} files, {size:,} bytes{commit}\n", "-"


def _loaded(
    model: str, revision: str, file: str | None, settings: Sequence[sources.Setting]
) -> tuple[Path, model_packs.About, dict[str, int]]:
    """From the hub: its folder, where it is from, and its files."""
    import trio

    from asyncgrpo_agent import logs
    from asyncgrpo_agent.roles.model_source import have_model

    logs.set_up(as_json=False, level="WARNING")
    config: Config = sources.load(role="proxy", file=file, settings=settings)
    config = dataclasses.replace(
        host.with_engine_python(config),
        model=structs.replace(Model(), id=model, trust_remote_code=config.model.trust_remote_code),
    )

    def tell(reason: str) -> None:
        sys.stderr.write(f"{reason}\n")

    async def load() -> tuple[Path, model_packs.About, dict[str, int]]:
        loaded = await have_model(config, revision, tell, tries=TRIES)
        about = model_packs.About(id=model, commit=loaded.commit)
        return Path(loaded.folder), about, loaded.files

    return trio.run(load)


def _verify(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser("model verify", "model verify FOLDER", _VERIFY)
    parser.add_argument("folder", metavar="FOLDER")
    folder = Path(parser.parse_args(list(words)).folder)
    if not model_packs.is_pack(folder):
        raise ConfigError(
            f"is no pack: it lacks {model_packs.SUMS} or {model_packs.ABOUT}",
            where=str(folder),
            fix="`asyncgrpo-agent model pack` makes one",
        )
    model_packs.verify(folder, None)
    about = model_packs.about(folder)
    origin = f" of {about.id}, commit {about.commit}" if about.id else ""
    return f"{folder} is whole{origin}\n", "-"
