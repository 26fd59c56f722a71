"""The keys of the configuration as data, and the problems that can be found with them.

Everything here is read off the structs in `config`; nothing is listed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

from asyncgrpo_agent.config.sections import SECTIONS, Section
from asyncgrpo_agent.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "ASYNCGRPO_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key as parsing, `init` and error texts need it."""

    name: str
    type: Any
    default: object
    expects: str
    doc: str
    path_kind: str  # "" when the value is no path

    @property
    def bare_type(self) -> Any:
        """The type without its annotations: `int`, `dict[str, str]`, `Literal[...]`."""
        return self.type.__origin__

    @property
    def is_table(self) -> bool:
        return get_origin(self.bare_type) is dict

    @property
    def row_type(self) -> type[Section] | None:
        """What each table of an array of tables is; None for any other key."""
        items = get_args(self.bare_type) if get_origin(self.bare_type) is list else ()
        is_rows = bool(items) and isinstance(items[0], type) and issubclass(items[0], Section)
        return items[0] if is_rows else None


def _metas(tp: Any) -> list[Meta]:
    return [meta for meta in getattr(tp, "__metadata__", ()) if isinstance(meta, Meta)]


def _key(info: msgspec.structs.FieldInfo) -> Key:
    metas = _metas(info.type)
    default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
    options = get_args(getattr(info.type, "__origin__", None))
    titles = [meta.title for meta in metas if meta.title]
    return Key(
        name=info.name,
        type=info.type,
        default=default,
        expects=titles[0] if titles else "one of " + ", ".join(map(str, options)),
        doc=next((meta.description for meta in metas if meta.description), ""),
        path_kind=next((meta.extra["path"] for meta in metas if meta.extra), ""),
    )


def keys_of(section: type[Section]) -> dict[str, Key]:
    """The keys of a section, or of one table of an array."""
    infos = msgspec.structs.fields(section)
    return {info.name: _key(info) for info in infos if _metas(info.type)}


KEYS: Final[Mapping[str, Mapping[str, Key]]] = {
    name: keys_of(section) for name, section in SECTIONS.items()
}


def key_of(dotted: str) -> Key:
    """The key at `dotted`, as "replica.capacity"."""
    section, _, name = dotted.rpartition(".")
    return KEYS[section][name]


def variable_of(dotted: str) -> str:
    """The environment variable that sets the key at `dotted`."""
    return ENVIRONMENT_PREFIX + dotted.replace(".", "_").upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: where (`path` and `origin`), what, and what to do."""

    path: str
    what: str
    fix: str = ""
    origin: str = ""

    def __str__(self) -> str:
        where = f"{self.path} ({self.origin})" if self.origin else self.path
        text = f"{where}: {self.what}"
        return f"{text}. {self.fix}" if self.fix else text


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """All problems in one error; each has a line of its own."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]))
    lines = [f"{len(problems)} problems in the configuration:", *map(str, problems)]
    return ConfigError("\n  ".join(lines))
