"""What a configuration needs of this host: paths, the engine's Python, the join line.

Everything here reads the disk, so it is kept apart from parsing. Problems are collected, as
everywhere. A bucket that is mounted but does not answer is none of them: mounts come back, and
waiting for one is the business of the role.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

from msgspec import structs

from asyncgrpo_agent.config.keys import Problem, config_error
from asyncgrpo_agent.config.kinds import is_hub_name
from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.errors import ConfigError

LOOK_S: Final = 10.0  # how long a mount may take to say whether a folder is there
_MODE_OF: Final = {"file": stat.S_ISREG, "folder": stat.S_ISDIR}


def check_platform() -> None:
    """Raise ConfigError where this program does not run: anywhere but on Linux x86-64."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise ConfigError(
            f"{system} on {machine} is not supported",
            where="this host",
            fix="Take a Linux x86-64 host",
        )


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
    line = "" if config.role == "local" or config.has_proxy else join_line(config, stdin)
    return dataclasses.replace(with_engine_python(config), join_line=line)


def with_engine_python(config: Config) -> Config:
    engine = structs.replace(config.engine, python=str(engine_python(config)))
    return dataclasses.replace(config, engine=engine)


def engine_python(config: Config) -> Path:
    """The engine's interpreter: the configured one, else a shipped one, else one of the PATH."""
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
    from asyncgrpo_agent.procs.installed_engine import python_with

    package = "trl" if config.role == "trainer" else "vllm"
    installed = python_with(package)
    if installed is not None:
        return installed
    looked = ", ".join(map(str, candidates))
    raise ConfigError(
        f"no Python for vLLM and TRL; looked for {looked} and {package} in python3",
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
        folders = (beside, beside.parent, Path("/opt/asyncgrpo-agent/current"))
        return [folder / "engine/bin/python" for folder in folders]
    checkout = Path(__file__).resolve().parents[3]
    return [checkout / "engine/bin/python", checkout / ".engine/bin/python"]


def _where(config: Config, path: str) -> str:
    origin = config.origins.get(path, "")
    return f"{path} ({origin})" if origin else path


def _stat(path: str) -> int:
    return os.stat(path).st_mode


def _look(path: str) -> int:
    """`_stat` of what may be on a mount; TimeoutError, an OSError, if that hangs."""
    from asyncgrpo_agent.procs.look import mode_of

    mode = mode_of(path, LOOK_S)
    if mode is None:
        raise TimeoutError(errno.ETIMEDOUT, "no answer")
    return mode


def _missing(path: str, kind: str, mode_of: Callable[[str], int] = _stat) -> str:
    """What is wrong with `path` as a file or folder; "" when nothing is."""
    try:
        mode = mode_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if _MODE_OF[kind](mode) else f"is not a {kind}"


def fault_of_folder(path: str) -> str:
    """What is wrong with a folder that may be a mount, for whoever looks on; "" when nothing is."""
    return _missing(path, "folder", _look)


def _at(config: Config, path: str, kind: str, fix: str) -> Iterator[Problem]:
    value = str(config.value(path))
    if value and (fault := _missing(value, kind)):
        origin = config.origins.get(path, "")
        yield Problem(path=path, what=f"{value} {fault}", fix=fix, origin=origin)


def _open_secret(config: Config, path: str) -> Iterator[Problem]:
    """A file with a secret that is not for its owner alone."""
    yield from _open_file(path, str(config.value(path)), config.origins.get(path, ""))


def _open_file(path: str, name: str, origin: str) -> Iterator[Problem]:
    file = Path(name)
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and file.is_relative_to(credentials):
        return  # systemd guards these by an access list, which shows as bits of the group
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        yield Problem(
            path=path,
            what=f"{file} can be read by others (mode {mode:04o})",
            fix=f"chmod 600 {file}",
            origin=origin,
        )


def _state(config: Config) -> Iterator[Problem]:
    if config.state_dir.exists():
        yield from _at(config, "agent.state_dir", "folder", "Move it away or use --state-dir")


def _model(config: Config) -> Iterator[Problem]:
    if not config.model.path:
        return  # it is loaded once the agent runs
    fix = "Download the model to this host first, or name it by model.id"
    faults = list(_at(config, "model.path", "folder", fix))
    yield from faults
    if not faults and _missing(f"{config.model.path}/config.json", "file"):
        yield Problem(
            path="model.path",
            what=f"{config.model.path} has no config.json",
            fix="Give the folder that holds the model's own files",
            origin=config.origins.get("model.path", ""),
        )


def _bucket(config: Config) -> Iterator[Problem]:
    if config.bucket.source == "link":
        return  # the agent makes its folder, below its state
    if config.bucket.url:
        yield from _mount_s3(config)
        return
    is_own = config.role == "local" and "bucket.path" not in config.origins
    fault = "" if is_own else _missing(config.bucket.path, "folder", _look)
    if fault and not fault.startswith("cannot"):
        yield Problem(
            path="bucket.path",
            what=f"{config.bucket.path} {fault}",
            fix="Create it or mount it",
            origin=config.origins.get("bucket.path", ""),
        )


def _mount_s3(config: Config) -> Iterator[Problem]:
    """What mount-s3 needs. Its mount point is made, and may be a dead mount now."""
    if (fault := _missing(config.bucket.path, "folder", _look)).startswith("is not"):
        yield Problem(
            path="bucket.path",
            what=f"{config.bucket.path} {fault}",
            fix="Move it away or choose another",
            origin=config.origins.get("bucket.path", ""),
        )
    if shutil.which(config.bucket.mount_s3) is None:
        yield Problem(
            path="bucket.mount_s3",
            what=f"{config.bucket.mount_s3} is not an executable file",
            fix="Install Mountpoint for Amazon S3, or give the path of its mount-s3",
            origin=config.origins.get("bucket.mount_s3", ""),
        )
    yield from _at(config, "bucket.ca_bundle", "file", "Give a PEM file of the store's CA")
    if config.bucket.credentials_file:
        faults = list(_at(config, "bucket.credentials_file", "file", "Give a file with the keys"))
        yield from faults or _open_secret(config, "bucket.credentials_file")


def _join(config: Config) -> Iterator[Problem]:
    if config.has_proxy:  # which makes one
        return
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


def _upstreams(config: Config) -> Iterator[Problem]:
    """The files and variables that the tables of a proxy's upstreams name."""
    origin = config.origins.get("proxy.upstream", "")
    for number, upstream in enumerate(config.proxy.upstream if config.has_proxy else [], 1):
        at = f"proxy.upstream[{number}]"
        for key, file in (("token_file", upstream.token_file), ("ca_file", upstream.ca_file)):
            if file and (fault := _missing(file, "file")):
                yield Problem(path=f"{at}.{key}", what=f"{file} {fault}", origin=origin)
            elif key == "token_file" and file:
                yield from _open_file(f"{at}.{key}", file, origin)
        variable = upstream.token_env
        if variable and not os.environ.get(variable):
            what = f"${variable} is not set"
            yield Problem(path=f"{at}.token_env", what=what, origin=origin)


def _training(config: Config) -> Iterator[Problem]:
    for path in (
        "train.script",
        "train.accelerate_config",
        "train.dataset",
        "train.eval.dataset",
    ):
        if not is_hub_name(str(config.value(path))):
            yield from _at(config, path, "file", "Give a file on this host")
    for folder in config.train.python_path:
        if fault := _missing(folder, "folder"):
            origin = config.origins.get("train.python_path", "")
            yield Problem(path="train.python_path", what=f"{folder} {fault}", origin=origin)


_Check = Callable[[Config], Iterator[Problem]]
_CHECKS: Final[dict[Role, tuple[_Check, ...]]] = {
    "proxy": (_state, _certificate, _upstreams),
    "replica": (_state, _join, _bucket, _model, _engine),
    "trainer": (_state, _join, _bucket, _model, _engine, _training, _certificate, _upstreams),
    "local": (_state, _bucket, _model, _engine, _training),
}
