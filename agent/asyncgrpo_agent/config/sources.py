"""The configuration put together: defaults < file < environment < flags.

`parse` depends on its arguments alone; `load` reads the file and the process's environment. Every
problem in every source is reported in one ConfigError. Whether paths exist is not asked here (see
`config.host`), so that a file can be checked on any machine.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from asyncgrpo_agent.config.keys import (
    ENVIRONMENT_PREFIX,
    KEYS,
    Problem,
    config_error,
    variable_of,
)
from asyncgrpo_agent.config.rules import engine_args_problems, rule_problems
from asyncgrpo_agent.config.sections import ROLES, SECTIONS, Bucket, Config, Role
from asyncgrpo_agent.config.values import Leaf, Values, leaves_of
from asyncgrpo_agent.errors import ConfigError, UsageError

ROLE_VARIABLE: Final = "ASYNCGRPO_ROLE"
FILE_VARIABLE: Final = "ASYNCGRPO_CONFIG"
JOIN_VARIABLE: Final = "ASYNCGRPO_JOIN"
STATE_DIR_VARIABLE: Final = "ASYNCGRPO_STATE_DIR"
# Tables whose entries have variables of their own: any name that no other key claims.
_OPEN_TABLES: Final = ("train.lora", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value given as text: by a flag, or as `--set path=value`."""

    path: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A configuration file: its text, the name to report it by, and its folder."""

    text: str
    name: str
    folder: Path


def load(
    *,
    role: str | None,
    file: str | None,
    settings: Sequence[Setting] = (),
    engine_args: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of this process."""
    environ = os.environ if environ is None else environ
    file = file or environ.get(FILE_VARIABLE)
    return parse(
        role=chosen_role(role or environ.get(ROLE_VARIABLE)),
        document=_read(file) if file else None,
        environ=environ,
        settings=settings,
        engine_args=engine_args,
        cwd=Path.cwd(),
    )


def parse(
    *,
    role: Role,
    cwd: Path,
    document: Document | None = None,
    environ: Mapping[str, str] | None = None,
    settings: Sequence[Setting] = (),
    engine_args: Sequence[str] = (),
) -> Config:
    """A whole and valid configuration, or one ConfigError with every problem."""
    environ = environ or {}
    values = Values()
    for leaf in _document_leaves(document) if document else ():
        values.add(leaf)
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and environ[variable]:
            _add_variable(values, variable, environ[variable], cwd)
    for setting in settings:
        values.add(_text_leaf(setting.path, setting.value, setting.origin, cwd))
    config = _config(role, values, environ)
    found = [*rule_problems(config), *engine_args_problems(engine_args, "command line after --")]
    # A key that already has a problem is not called missing as well.
    known = {problem.path for problem in values.problems}
    problems = values.problems + [problem for problem in found if problem.path not in known]
    if problems:
        raise config_error(problems)
    return _with_engine_args(config, engine_args)


def chosen_role(name: str | None) -> Role:
    for role in ROLES:
        if name == role:
            return role
    what = f"there is no role {name!r}" if name else "no role was given"
    raise UsageError(what, fix=f"Use --role {'|'.join(ROLES)}")


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Where systemd says, else where the XDG rules say."""
    if given := environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    base = environ.get("XDG_STATE_HOME", "")
    home = Path(environ.get("HOME") or Path.home())
    return (Path(base) if base.startswith("/") else home / ".local/state") / "asyncgrpo-agent"


def _read(file: str) -> Document:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error.strerror}",
            where=file,
            fix="`asyncgrpo-agent init --role ROLE` writes one",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", where=file) from error
    return Document(text=text, name=file, folder=Path(os.path.abspath(file)).parent)


def _document_leaves(document: Document) -> Iterator[Leaf]:
    try:
        table = tomllib.loads(document.text)
    except tomllib.TOMLDecodeError as error:  # its text has line and column
        raise ConfigError(f"not valid TOML: {error}", where=document.name) from error
    top = Leaf(path=(), value=None, origin=document.name, folder=document.folder)
    for leaf in leaves_of(table, top):
        if leaf.value != {} or leaf.dotted not in SECTIONS:
            yield leaf


def _text_leaf(dotted: str, text: str, origin: str, cwd: Path) -> Leaf:
    path = tuple(dotted.split("."))
    return Leaf(path=path, value=text, origin=origin, folder=cwd, is_text=True)


def _variables() -> dict[str, str]:
    own = {variable_of(f"{s}.{name}"): f"{s}.{name}" for s, keys in KEYS.items() for name in keys}
    return own | {STATE_DIR_VARIABLE: "agent.state_dir"}


def _add_variable(values: Values, variable: str, text: str, cwd: Path) -> None:
    if variable in (ROLE_VARIABLE, FILE_VARIABLE, JOIN_VARIABLE):
        return
    known = _variables()
    dotted = known.get(variable) or _open_path(variable)
    if dotted:
        values.add(_text_leaf(dotted, text, variable, cwd))
        return
    names = [*known, ROLE_VARIABLE, FILE_VARIABLE, JOIN_VARIABLE]
    near = get_close_matches(variable, names, n=1, cutoff=0.0)
    what = f"unknown variable; all that begin with {ENVIRONMENT_PREFIX} are the agent's"
    values.problems.append(Problem(path=f"${variable}", what=what, fix=f"Did you mean ${near[0]}?"))


def _open_path(variable: str) -> str:
    for table in _OPEN_TABLES:
        name = variable.removeprefix(variable_of(table) + "_")
        if name != variable:
            return f"{table}.{name.lower()}"
    return ""


def _config(role: Role, values: Values, environ: Mapping[str, str]) -> Config:
    sections: dict[str, Any] = {name: values.section(name) for name in SECTIONS if "." not in name}
    state_dir = sections["agent"].state_dir or str(default_state_dir(environ))
    sections["agent"] = structs.replace(sections["agent"], state_dir=state_dir)
    sections["bucket"] = _with_path(sections["bucket"], role, state_dir)
    return Config(
        role=role, **sections, join_line=environ.get(JOIN_VARIABLE, ""), origins=values.origins
    )


def _with_path(bucket: Bucket, role: Role, state_dir: str) -> Bucket:
    names = {"mirror": bucket.source == "link", "mount": bucket.url, "bucket": role == "local"}
    own = next((f"{state_dir}/{name}" for name, is_so in names.items() if is_so), "")
    return bucket if bucket.path or not own else structs.replace(bucket, path=own)


def _with_engine_args(config: Config, more: Sequence[str]) -> Config:
    engine = structs.replace(config.engine, args=[*config.engine.args, *more])
    return dataclasses.replace(config, engine=engine)
