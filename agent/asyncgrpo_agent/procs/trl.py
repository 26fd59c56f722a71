"""TRL as a child: how the engine-side package is started, and how it says what is wrong.

The package `asyncgrpo_engine` lies beside the agent's own and runs in the engine's Python. Only a
folder that holds it alone is put on that Python's path, so that none of the agent's own modules and
libraries can be imported there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.errors import EXIT_CONFIG, ConfigError

MODULE: Final = "asyncgrpo_engine.train"
_ACCELERATE: Final = ("-m", "accelerate.commands.launch")
_TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone")


def package_folder(scratch: Path) -> Path:
    """A folder below `scratch` in which only `asyncgrpo_engine` can be imported."""
    bundle = getattr(sys, "_MEIPASS", None)
    home = Path(bundle) if bundle else Path(__file__).resolve().parent.parent.parent
    folder = scratch / "engine-path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "asyncgrpo_engine"
    if link.is_symlink():
        link.unlink()
    link.symlink_to(home / "asyncgrpo_engine")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How many processes train together, and accelerate's own file; one alone needs neither."""

    processes: int = 1
    accelerate_config: str = ""

    def words(self) -> list[str]:
        """What comes between the Python and its module.

        Without a file it is torchrun, which accelerate would start as well, but for GPUs only and
        always at the same port.
        """
        if self.accelerate_config:
            number = [f"--num_processes={self.processes}"] if self.processes > 1 else []
            return [*_ACCELERATE, f"--config_file={self.accelerate_config}", *number, "-m"]
        if self.processes > 1:
            return [*_TORCHRUN, f"--nproc-per-node={self.processes}", "-m"]
        return ["-m"]


def train_command(
    python: str,
    job: Path,
    *,
    check: bool,
    python_path: Sequence[str],
    scratch: Path,
    launch: Launch,
    offline: bool = True,
) -> tuple[list[str], dict[str, str]]:
    """The command line and what it adds to the environment. A check is one process; `offline` keeps
    everybody from asking a model hub."""
    words = ["-m"] if check else launch.words()
    argv = [python, *words, MODULE, "--config", str(job), *(["--check"] if check else [])]
    additions = {
        "PYTHONPATH": ":".join([str(package_folder(scratch)), *python_path]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # TRL forks after tokenizers were used
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if offline:  # model and data are local files
        additions["HF_HUB_OFFLINE"] = "1"
    return argv, additions


def config_error(returncode: int, tail: str) -> ConfigError | None:
    """What the child found wrong with its configuration, if that is why it ended."""
    if returncode != EXIT_CONFIG:
        return None
    texts = [str(ConfigError(p.what, where=p.where, fix=p.fix)) for p in problems_in(tail)]
    return ConfigError("; ".join(texts) or "the engine-side child refused its configuration")


class _Problem(msgspec.Struct, frozen=True):
    what: str
    where: str = ""
    fix: str = ""


class _Problems(msgspec.Struct, frozen=True):
    problems: list[_Problem]


class _Report(msgspec.Struct, frozen=True):
    error: _Problems


def problems_in(tail: str) -> list[_Problem]:
    """The problems of the last line that reports any; users' code may print what it likes."""
    for line in reversed(tail.splitlines()):
        try:
            return msgspec.json.decode(line, type=_Report).error.problems
        except msgspec.MsgspecError:
            continue
    return []
