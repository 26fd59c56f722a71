"""The text that `init` writes: every key of a role with its default, type and meaning.

It is made from the structs in `config` alone, so it cannot drift from what is parsed. Keys that
the role needs stand bare and empty, all others are commented out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

import tomli_w

from asyncgrpo_agent.config.keys import KEYS, Key, keys_of, variable_of
from asyncgrpo_agent.config.sections import REQUIRED, SECTIONS, SECTIONS_OF, Role

_HEAD: Final = (
    "Configuration of an asyncgrpo-agent in role {role}.",
    "Keys that are commented out show their default. Bare ones are needed: fill them in. A "
    "relative path counts from the folder of this file. Environment variables override this "
    "file, flags override both.",
)
_PASSTHROUGH: Final = (
    "Any other key is handed to TRL's AsyncGRPOConfig as it stands: max_steps, learning_rate, "
    "num_generations, max_completion_length, max_staleness, temperature, ..."
)
_WIDTH: Final = 98


def example(role: Role) -> str:
    """A whole commented configuration file for `role`."""
    lines = [line for text in _HEAD for line in _comment(text.format(role=role))]
    for section in SECTIONS_OF[role]:
        lines += ["", *_section(section, role)]
    return "\n".join(lines) + "\n"


def _section(section: str, role: Role) -> Iterator[str]:
    yield from _comment(SECTIONS[section].__doc__ or "")
    yield f"[{section}]"
    tables = []
    for key in KEYS[section].values():
        if key.is_table or key.row_type is not None:
            tables.append(key)
        else:
            yield from _entry(section, key, role)
    if section == "train":
        yield ""
        yield from _comment(_PASSTHROUGH)
    for key in tables:
        yield from _table(section, key)


def _entry(section: str, key: Key, role: Role) -> Iterator[str]:
    dotted = f"{section}.{key.name}"
    needed = dotted in REQUIRED[role]
    yield ""
    yield from _comment(key.doc)
    note = f"{key.expects[0].upper()}{key.expects[1:]}; ${variable_of(dotted)}."
    yield from _comment(f"Needed. {note}" if needed else note)
    line = tomli_w.dumps({key.name: key.default}).rstrip()
    yield line if needed else f"#{line}"


def _table(section: str, key: Key) -> Iterator[str]:
    yield ""
    yield from _comment(key.doc)
    if key.row_type is None:
        yield f"#[{section}.{key.name}]"
        return
    yield from _comment(key.row_type.__doc__ or "")
    yield f"#[[{section}.{key.name}]]"
    for row_key in keys_of(key.row_type).values():
        yield ""
        expects = f"{row_key.expects[0].upper()}{row_key.expects[1:]}."
        yield from _comment(f"{row_key.doc} {expects}")
        yield "#" + tomli_w.dumps({row_key.name: row_key.default}).rstrip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
