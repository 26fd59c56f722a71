"""From loose values to typed sections: every leaf is converted by itself, so that all problems
are found at once.

A leaf is one value at one path, from one origin. Tables are taken apart into leaves and put
together again, so a later source changes single entries of a table and leaves the others. This
module must not know where leaves come from.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from asyncgrpo_agent.config.keys import KEYS, Key, Problem, keys_of
from asyncgrpo_agent.config.kinds import is_hub_name
from asyncgrpo_agent.config.sections import SECTIONS, Section

_SWITCH: Final = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}
_JOIN_LINE = re.compile(r"[A-Za-z0-9_=.-]{120,}")  # longer than any file name worth having


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value. `is_text`: written without TOML's types. Relative paths are below `folder`."""

    path: tuple[str, ...]
    value: object
    origin: str
    folder: Path
    is_text: bool = False

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a leaf belongs: `names` is its place within the section."""

    section: str
    names: tuple[str, ...]
    type: Any
    key: Key | None  # None: a value for TRL, of whatever type
    is_table: bool


def leaves_of(table: Mapping[str, object], at: Leaf) -> Iterator[Leaf]:
    """Take `table`, found at the path of `at`, apart; an empty table stays one leaf."""
    for name, value in table.items():
        leaf = Leaf(path=(*at.path, name), value=value, origin=at.origin, folder=at.folder)
        if isinstance(value, dict) and value:
            yield from leaves_of(value, leaf)
        else:
            yield leaf


class Values:
    """Leaves collected by section. Later leaves win; wrong ones leave a problem and no value."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}

    def add(self, leaf: Leaf) -> None:
        slot = _slot(leaf.path)
        if slot is None:
            self._object(leaf, "unknown key", _hint(leaf.path))
            return
        value = _from_text(str(leaf.value), slot.type) if leaf.is_text else leaf.value
        if slot.key is not None and slot.key.row_type is not None:
            self._add_rows(leaf, slot, value, slot.key.row_type)
            return
        if slot.is_table and isinstance(value, dict) and value:
            for inner in leaves_of(value, leaf):
                self.add(inner)
        elif self._fits(leaf, slot, value):
            converted = msgspec.convert(value, slot.type)
            located = _located(converted, slot.key.path_kind if slot.key else "", leaf.folder)
            _put(self._sections[slot.section], slot.names, located)
            self.origins[leaf.dotted] = leaf.origin

    def _add_rows(self, leaf: Leaf, slot: _Slot, value: object, row_type: type[Section]) -> None:
        """An array of tables, as a whole: a later source replaces all of it."""
        if not (isinstance(value, list) and all(isinstance(row, dict) for row in value)):
            expects = slot.key.expects if slot.key else ""
            self._object(leaf, f"expected {expects}, got {_shown(value)}", "")
            return
        keys = keys_of(row_type)
        rows: list[Section] = []
        for number, row in enumerate(value, 1):
            found = {}
            for name, item in row.items():
                at = Leaf(
                    path=(*leaf.path[:-1], f"{leaf.path[-1]}[{number}]", name),
                    value=item,
                    origin=leaf.origin,
                    folder=leaf.folder,
                )
                if name not in keys:
                    near = get_close_matches(name, keys, n=1, cutoff=0.6)
                    hint = f"Did you mean {near[0]}?" if near else f"Keys are {', '.join(keys)}"
                    self._object(at, "unknown key", hint)
                elif self._fits(at, _row_slot(slot, keys[name]), item):
                    converted = msgspec.convert(item, keys[name].type)
                    found[name] = _located(converted, keys[name].path_kind, leaf.folder)
            rows.append(row_type(**found))
        _put(self._sections[slot.section], slot.names, rows)
        self.origins[leaf.dotted] = leaf.origin

    def section(self, name: str) -> Section:
        """The section `name` with its own sections inside."""
        inner = {
            inner_name.removeprefix(f"{name}."): self.section(inner_name)
            for inner_name in SECTIONS
            if inner_name.startswith(f"{name}.")
        }
        return SECTIONS[name](**self._sections[name], **inner)

    def _fits(self, leaf: Leaf, slot: _Slot, value: object) -> bool:
        expects = "text" if slot.type is str else slot.key.expects if slot.key else ""
        is_join = slot.key is not None and slot.key.path_kind == "join"
        if is_join and _JOIN_LINE.fullmatch(str(value)):
            self._object(
                leaf,
                "this is a join line, which is a secret",
                "Give the path of a file that holds it, or put it in $ASYNCGRPO_JOIN",
            )
        elif not _converts(value, slot.type):
            # Entries of engine.env and a mistyped join may be secrets: those are not repeated.
            got = "" if is_join or len(slot.names) > 1 else f", got {_shown(value)}"
            self._object(leaf, f"expected {expects}{got}", "")
        else:
            return True
        return False

    def _object(self, leaf: Leaf, what: str, fix: str) -> None:
        self.problems.append(Problem(path=leaf.dotted, what=what, fix=fix, origin=leaf.origin))


def _slot(path: tuple[str, ...]) -> _Slot | None:
    if "" in path:
        return None
    for depth in (2, 1):  # the deepest section first: [train.eval] before [train]
        section, names = ".".join(path[:depth]), path[depth:]
        if section not in SECTIONS or not names:
            continue
        key = KEYS[section].get(names[0])
        if key is not None:
            return _own_slot(section, names, key)
        if section == "train" and not _is_near_miss(names[0]):
            place = ("passthrough", *names)
            return _Slot(section=section, names=place, type=Any, key=None, is_table=True)
        return None
    return None


def _own_slot(section: str, names: tuple[str, ...], key: Key) -> _Slot | None:
    inside = len(names) > 1
    tp = get_args(key.bare_type)[1] if inside and key.is_table else key.type
    if inside and (not key.is_table or (len(names) > 2 and tp is not Any)):
        return None
    return _Slot(section=section, names=names, type=tp, key=key, is_table=key.is_table)


def _row_slot(slot: _Slot, key: Key) -> _Slot:
    return _Slot(section=slot.section, names=(key.name,), type=key.type, key=key, is_table=False)


def _is_near_miss(name: str) -> bool:
    """Whether `name` looks like a misspelt key of [train]; TRL has no name that close to one."""
    return bool(get_close_matches(name, [*KEYS["train"], "eval", "passthrough"], cutoff=0.85))


def _hint(path: tuple[str, ...]) -> str:
    known = [f"{section}.{name}" for section, keys in KEYS.items() for name in keys]
    same_name = [dotted for dotted in known if dotted.rpartition(".")[2] == path[-1]]
    near = get_close_matches(
        ".".join(path), same_name or known, n=1, cutoff=0.0 if same_name else 0.6
    )
    if near:
        return f"Did you mean {near[0]}?"
    return f"Sections are {', '.join(SECTIONS)}; `asyncgrpo-agent init` writes out every key"


def _from_text(text: str, tp: Any) -> object:
    """Text is a TOML value; where it is none, or a text is wanted anyway, it stands for itself."""
    bare = tp.__origin__ if hasattr(tp, "__metadata__") else tp
    if bare is bool and text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    wants_text = bare is str or (get_origin(bare) is Literal and isinstance(get_args(bare)[0], str))
    if wants_text and text[:1] not in ("'", '"'):
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        # A flag's `True` is meant as TOML's `true`.
        return text.lower() == "true" if text.lower() in ("true", "false") else text
    return document["value"] if len(document) == 1 else text


def _converts(value: object, tp: Any) -> bool:
    try:
        converted = msgspec.convert(value, tp)
    except msgspec.ValidationError:
        return False
    return tp is Any or not isinstance(converted, float) or math.isfinite(converted)


def _located(value: object, path_kind: str, folder: Path) -> object:
    """Paths made absolute; every other value as it is."""
    if not path_kind:
        return value
    if isinstance(value, list):
        return [_absolute(item, path_kind, folder) for item in value]
    return _absolute(str(value), path_kind, folder)


def _absolute(text: str, kind: str, folder: Path) -> str:
    is_word = kind == "executable" and "/" not in text
    is_stdin = kind == "join" and text == "-"
    is_name = kind == "data" and is_hub_name(text)
    if not text or is_word or is_stdin or is_name:
        return text
    return os.path.abspath(folder / os.path.expanduser(text))


def _put(table: dict[str, Any], names: tuple[str, ...], value: object) -> None:
    for name in names[:-1]:
        if not isinstance(table.get(name), dict):
            table[name] = {}
        table = table[name]
    is_merge = value == {} and isinstance(table.get(names[-1]), dict)
    if not is_merge:
        table[names[-1]] = value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
