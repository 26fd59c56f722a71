"""TRL as a child: how the engine-side package is started, and how it says what is wrong.

The package `asyncgrpo_engine` lies beside the agent's own and runs in the engine's Python. Only a
folder that holds it alone is put on that Python's path, so that none of the agent's own modules and
libraries can be imported there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncgrpo_agent.errors import EXIT_CONFIG, ConfigError

MODULE: Final = "asyncgrpo_engine.train"


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


def train_command(
    python: str, job: Path, *, check: bool, python_path: Sequence[str], scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line and what it adds to the environment."""
    argv = [python, "-m", MODULE, "--config", str(job), *(["--check"] if check else [])]
    additions = {
        "PYTHONPATH": ":".join([str(package_folder(scratch)), *python_path]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # TRL forks after tokenizers were used
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",  # model and data are local files
    }
    return argv, additions


def config_error(returncode: int, tail: str) -> ConfigError | None:
    """What the child found wrong with its configuration, if that is why it ended."""
    if returncode != EXIT_CONFIG:
        return None
    problems = _problems(tail)
    texts = [str(ConfigError(p["what"], where=p["where"], fix=p["fix"])) for p in problems]
    return ConfigError("; ".join(texts) or "the engine-side child refused its configuration")


def _problems(tail: str) -> list[dict[str, str]]:
    """The problems of the last line that reports any."""
    for line in reversed(tail.splitlines()):
        if not line.startswith('{"error"'):
            continue
        try:
            report: Any = json.loads(line)
        except ValueError:
            continue
        rows = report["error"]["problems"]
        return [{key: str(row.get(key, "")) for key in ("what", "where", "fix")} for row in rows]
    return []
