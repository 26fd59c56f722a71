"""What a configuration needs of this host: paths, the engine's Python, the join line.

Everything here reads the disk, so it is kept apart from parsing. Problems are collected, as
everywhere. A bucket that is mounted but does not answer is none of them: mounts come back, and
waiting for one is the business of the role.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

from msgspec import structs

from asyncgrpo_agent.config.keys import Problem, config_error
from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.errors import ConfigError

_MODE_OF: Final = {"file": stat.S_ISREG, "folder": stat.S_ISDIR}


def check_host(config: Config) -> None:
    """Raise one ConfigError with everything that this host lacks for `config`."""
    checks = _CHECKS[config.role]
    if problems := [problem for check in checks for problem in check(config)]:
        raise config_error(problems)


def resolved(config: Config, stdin: TextIO) -> Config:
    """Check the host, then add what only the host knows: the engine's Python and the join line."""
    check_host(config)
    if config.role == "proxy":
        return config
    line = join_line(config, stdin) if config.role != "local" else ""
    return dataclasses.replace(with_engine_python(config), join_line=line)


def with_engine_python(config: Config) -> Config:
    engine = structs.replace(config.engine, python=str(engine_python(config)))
    return dataclasses.replace(config, engine=engine)


def engine_python(config: Config) -> Path:
    """The engine's interpreter: the configured one, else the one shipped beside the agent."""
    given = config.engine.python
    if given:
        found = shutil.which(given)
        if found is None:
            where, fix = _where(config, "engine.python"), "Give the bin/python of an environment"
            raise ConfigError(f"{given} is not an executable file", where=where, fix=fix)
        return Path(os.path.abspath(found))  # links stay: they tell Python its environment
    candidates = _shipped_engines()
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    looked = ", ".join(map(str, candidates))
    raise ConfigError(
        f"no Python for vLLM and TRL; looked for {looked}",
        where="engine.python",
        fix="Set it to the bin/python of an environment that has them (--engine-python)",
    )


def join_line(config: Config, stdin: TextIO) -> str:
    """The join line, from $ASYNCGRPO_JOIN, standard input or the file."""
    if config.join_line:
        return config.join_line.strip()
    if config.link.join == "-":
        return stdin.read().strip()
    try:
        return Path(config.link.join).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the join file {config.link.join} cannot be read: {error}",
            where=_where(config, "link.join"),
            fix="`asyncgrpo-agent token create` on the proxy makes one",
        ) from error


def _shipped_engines() -> list[Path]:
    if getattr(sys, "frozen", False):
        beside = Path(sys.executable).resolve().parent
        return [folder / "engine/bin/python" for folder in (beside, beside.parent)]
    checkout = Path(__file__).resolve().parents[2]
    return [checkout / "engine/bin/python", checkout / ".engine/bin/python"]


def _where(config: Config, path: str) -> str:
    origin = config.origins.get(path, "")
    return f"{path} ({origin})" if origin else path


def _missing(path: str, kind: str) -> str:
    """What is wrong with `path` as a file or folder; "" when nothing is."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if _MODE_OF[kind](mode) else f"is not a {kind}"


def _at(config: Config, path: str, kind: str, fix: str) -> Iterator[Problem]:
    value = str(config.value(path))
    if value and (fault := _missing(value, kind)):
        origin = config.origins.get(path, "")
        yield Problem(path=path, what=f"{value} {fault}", fix=fix, origin=origin)


def _open_secret(config: Config, path: str) -> Iterator[Problem]:
    """A file with a secret that is not for its owner alone."""
    file = Path(str(config.value(path)))
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and file.is_relative_to(credentials):
        return  # systemd guards these by an access list, which shows as bits of the group
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        yield Problem(
            path=path,
            what=f"{file} can be read by others (mode {mode:04o})",
            fix=f"chmod 600 {file}",
            origin=config.origins.get(path, ""),
        )


def _state(config: Config) -> Iterator[Problem]:
    if config.state_dir.exists():
        yield from _at(config, "agent.state_dir", "folder", "Move it away or use --state-dir")


def _model(config: Config) -> Iterator[Problem]:
    faults = list(_at(config, "model.path", "folder", "Download the model to this host first"))
    yield from faults
    if not faults and _missing(f"{config.model.path}/config.json", "file"):
        yield Problem(
            path="model.path",
            what=f"{config.model.path} has no config.json",
            fix="Give the folder that holds the model's own files",
            origin=config.origins.get("model.path", ""),
        )


def _bucket(config: Config) -> Iterator[Problem]:
    is_own = config.role == "local" and "bucket.path" not in config.origins
    if is_own or _missing(config.bucket.path, "folder").startswith("cannot"):
        return
    yield from _at(config, "bucket.path", "folder", "Create it or mount it")


def _join(config: Config) -> Iterator[Problem]:
    if not config.join_line and config.link.join != "-":
        fix = "`asyncgrpo-agent token create` on the proxy makes it"
        faults = list(_at(config, "link.join", "file", fix))
        yield from faults or _open_secret(config, "link.join")


def _engine(config: Config) -> Iterator[Problem]:
    try:
        engine_python(config)
    except ConfigError as error:
        yield Problem(path=error.where, what=error.what, fix=error.fix)


def _certificate(config: Config) -> Iterator[Problem]:
    for path in ("proxy.certificate", "proxy.key"):
        yield from _at(config, path, "file", "Leave both empty for one that the proxy issues")


def _training(config: Config) -> Iterator[Problem]:
    for path in ("train.dataset", "train.eval.dataset"):
        yield from _at(config, path, "file", "Give a file on this host")
    for folder in config.train.python_path:
        if fault := _missing(folder, "folder"):
            origin = config.origins.get("train.python_path", "")
            yield Problem(path="train.python_path", what=f"{folder} {fault}", origin=origin)


_Check = Callable[[Config], Iterator[Problem]]
_CHECKS: Final[dict[Role, tuple[_Check, ...]]] = {
    "proxy": (_state, _certificate),
    "replica": (_state, _join, _bucket, _model, _engine),
    "trainer": (_state, _join, _bucket, _model, _engine, _training),
    "local": (_state, _bucket, _model, _engine, _training),
}
