"""`doctor`, `paths` and `version`: what this host is, and what this program is and writes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.flags import PROGRAM, Parser, add_config_flags, settings_of
from asyncgrpo_agent.procs.model_download import hub_home
from asyncgrpo_agent.tables import table

_DOCTOR: Final = """\
Look at this host: what a role needs, what is there, and how to mend what is not.

The role's own flags and configuration say what is looked for. Exit code 1 if anything is wrong.
"""
ENGINE_PYTHON_VARIABLE: Final = "ASYNCGRPO_ENGINE_PYTHON"
LOG_DIR_VARIABLE: Final = "ASYNCGRPO_AGENT_LOG_DIR"
_LIBRARIES: Final = ("trio", "h2", "h11", "httpcore", "watchfiles", "msgspec", "cryptography")


def doctor(words: Sequence[str]) -> tuple[str, int]:
    """The text to show, and the exit code."""
    parser = Parser("doctor", "doctor [--role ROLE] [--config FILE] [--json] [flags]", _DOCTOR)
    add_config_flags(parser)
    parser.add_argument("--json", action="store_true", help="the rows as JSON objects")
    options = parser.parse_args(list(words))
    role = sources.chosen_role(options.role or os.environ.get(sources.ROLE_VARIABLE) or "replica")
    import trio

    from asyncgrpo_agent import doctor as checks
    from asyncgrpo_agent import logs
    from asyncgrpo_agent.procs.environment import secret_values

    logs.set_up(as_json=False, level="ERROR")
    logs.hide(*secret_values(os.environ))
    try:
        config = sources.load(role=role, file=options.config, settings=settings_of(options))
    except ConfigError as error:  # the host itself can be looked at all the same
        found = checks.as_tables(checks.rows_without_configuration(role, error))
    else:
        found = checks.as_tables(trio.run(checks.rows, config))
    code = int(any(row["fix"] for row in found))
    text = json.dumps(found, indent=2) + "\n" if options.json else table(found, "")
    return text, code


def paths(words: Sequence[str]) -> str:
    """Where an agent of this user keeps what, one line each."""
    usage = "paths [--state-dir DIR] [--log-dir DIR] [--json]"
    parser = Parser("paths", usage, "Show where an agent keeps its files on this host.")
    parser.add_argument("--state-dir", metavar="DIR", help="as given to the agent")
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.add_argument("--log-dir", metavar="DIR", help="as given to the agent")
    options = parser.parse_args(list(words))
    logs = options.log_dir or os.environ.get(LOG_DIR_VARIABLE)
    given = options.state_dir or os.environ.get(sources.STATE_DIR_VARIABLE)
    state = os.path.abspath(given or sources.default_state_dir(os.environ))
    found = {
        "state": state,
        "logs": os.path.abspath(logs or f"{state}/logs"),
        "caches": f"{state}/cache",
        "models": _models(state),
        "keys": f"{state}/runs",
        "proxy": f"{state}/proxy",
        "staged adapters": f"{state}/staged",
        "training output": f"{state}/output",
        "mount": f"{state}/mount",
        "sockets": os.environ.get("RUNTIME_DIRECTORY")
        or os.environ.get("XDG_RUNTIME_DIR")
        or "/tmp",  # noqa: S108 - as procs.vllm chooses
        "program": os.path.realpath(sys.executable),
    }
    if options.json:
        return json.dumps(found, indent=2) + "\n"
    width = max(map(len, found))
    return "".join(f"{name:{width}}  {path}\n" for name, path in found.items())


def _models(state: str) -> str:
    """Where those of a hub are loaded to, as the hub's own library decides."""
    home = os.environ.get("HF_HOME") or hub_home(Path.home(), Path(state)).get("HF_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME") or f"{Path.home()}/.cache"
        home = f"{cache}/huggingface"
    return os.environ.get("HF_HUB_CACHE") or f"{home}/hub"


def version_line() -> str:
    form = "binary" if getattr(sys, "frozen", False) else "source"
    return f"{PROGRAM} {__version__} ({form}), Python {_python()}, {ssl.OPENSSL_VERSION}"


def version(words: Sequence[str]) -> str:
    """This program's version; with --all what it is made of and runs on, and its engine's."""
    parser = Parser("version", "version [--all] [--engine-python FILE]", "Show versions.")
    whole = "of libraries, this system, and the engine's packages, too"
    parser.add_argument("--all", action="store_true", help=whole)
    parser.add_argument("--engine-python", metavar="FILE", help="as given to the agent")
    options = parser.parse_args(list(words))
    if not options.all:
        return version_line() + "\n"
    lines = [version_line(), *(f"{name} {_version_of(name)}" for name in _LIBRARIES)]
    libc = " ".join(platform.libc_ver())
    lines += [f"{platform.system()} {platform.release()}, {libc}", _engine(options.engine_python)]
    return "\n".join(lines) + "\n"


def _engine(python: str | None) -> str:
    """One line of what its Python has, as a replica would find it."""
    import trio

    from asyncgrpo_agent import doctor as checks
    from asyncgrpo_agent.config.sections import Config, Engine

    given = python or os.environ.get(ENGINE_PYTHON_VARIABLE) or ""
    row = trio.run(checks.engine, Config(role="replica", engine=Engine(python=given)))
    return f"engine: {row.found}"


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
