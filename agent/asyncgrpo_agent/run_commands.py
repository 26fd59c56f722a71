"""`run create|add|list` and `join add-key`: the commands about the key that a run signs with.

Adapters are as safe as the private half. It leaves the state folder where `run create` ran only
inside a trainer's join line: `token create` puts it in where proxy and key share a host, and
`join add-key` does where they do not. Nothing here prints it in any other way.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.core.join import PREFIX, decode
from asyncgrpo_agent.errors import ConfigError, UsageError
from asyncgrpo_agent.flags import Action, Parser, act
from asyncgrpo_agent.tables import table

_RUN: Final = """\
Make runs known on this host, with the key that their adapters are signed with.

  run create NAME                        make a run and its key, and show the public half
  run add NAME --public-key KEY|FILE|-   make a run of another host known to this proxy
  run list                               show runs and where their private keys are
"""
_JOIN: Final = """\
Work on join lines.

  join add-key [FILE]    complete a trainer's join line with the run's private key
"""


def run(words: Sequence[str]) -> tuple[str, str]:
    """Do what `run ...` says; gives what is to be written and where: a file, or "-"."""
    return act("run", _RUN, _RUN_ACTIONS, words)


def join(words: Sequence[str]) -> tuple[str, str]:
    """The same for `join ...`."""
    return act("join", _JOIN, _JOIN_ACTIONS, words)


def exposed_notes(names: Iterable[str]) -> list[str]:
    """What the operator of a proxy should know of runs whose private key is beside it."""
    return [
        f"run {name}: run key is on this host: adapters are not protected from it" for name in names
    ]


# --- run -------------------------------------------------------------------------------------


def _create(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "run create",
        "run create NAME [--state-dir DIR]",
        "Make a run and its signing key on this host; the public half is written to standard"
        " output,\nfor `run add` on a proxy that is another host.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the run")
    _add_state_dir(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store import identity

    state_dir = _state_dir(options.state_dir)
    public = identity.create_run(state_dir, options.name)
    _record(state_dir, "run.created", options.name, public)
    sys.stderr.write(f"run {options.name} created; its public key:\n")
    return public.hex() + "\n", "-"


def _add(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "run add",
        "run add NAME --public-key KEY|FILE|- [--state-dir DIR]",
        "Make a run known to this proxy whose private key is on another host and stays there.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the run")
    parser.add_argument(
        "--public-key",
        metavar="KEY",
        required=True,
        help="what `run create` printed there, a file that holds it, or - for standard input",
    )
    _add_state_dir(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store import identity

    state_dir, public = _state_dir(options.state_dir), _public_key(options.public_key)
    identity.add_run(state_dir, options.name, public)
    _record(state_dir, "run.added", options.name, public)
    sys.stderr.write(f"run {options.name} added\n")
    return "", "-"


def _public_key(given: str) -> bytes:
    """The key itself, or in a file. Raises ConfigError."""
    is_key = re.fullmatch(r"[0-9a-fA-F]{64}", given)
    text = given if is_key else _read(given)
    if Path(given).suffix == ".key":  # both halves look alike, and replicas are given this one
        raise ConfigError("is the private half", where=given, fix="Give run.pub, beside it")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(
            "holds no public key: 64 hexadecimal digits",
            where="standard input" if given == "-" else given,
            fix="`asyncgrpo-agent run list` shows it on the host where `run create` ran",
        )
    return bytes.fromhex(text)


def _list(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "run list",
        "run list [--json] [--state-dir DIR]",
        "Show the runs that this host knows, and whether their private keys are here.",
    )
    parser.add_argument("--json", action="store_true", help="show a JSON list")
    _add_state_dir(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store import identity

    state_dir = _state_dir(options.state_dir)
    rows = [
        {
            "run": facts.name,
            "public_key": facts.public_key.hex(),
            "private_key": "here" if facts.has_private_key else "elsewhere",
        }
        for facts in identity.list_runs(state_dir)
    ]
    if options.json:
        return json.dumps(rows, indent=1) + "\n", "-"
    return table(rows, "no runs", exposed_notes(identity.runs_exposed(state_dir))), "-"


# --- join ------------------------------------------------------------------------------------


def _add_key(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "join add-key",
        "join add-key [FILE] [--output FILE] [--state-dir DIR]",
        "Complete a trainer's join line, made on a proxy without the run's private key, on the\n"
        "host that has it: the one where `run create` ran.",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="join file; default: standard input"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write it there, for its owner alone; default: standard output",
    )
    _add_state_dir(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store import identity

    state_dir = _state_dir(options.state_dir)
    line = identity.complete_join(state_dir, _read(options.file))
    join = decode(line)
    _record(state_dir, "join.completed", join.run, join.run_public_key)
    return line + "\n", options.output or "-"


# --- this host -------------------------------------------------------------------------------


def _read(file: str) -> str:
    """What a small text file or standard input holds. Raises UsageError."""
    if file.startswith(PREFIX):
        raise UsageError(
            "this is a join line, which is a secret",
            fix="Give it on standard input, or the path of a file that holds it",
        )
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=file) from error
    except UnicodeDecodeError as error:
        raise UsageError("is no text", where=file) from error
    return text.strip()


def _record(state_dir: Path, event: str, run: str, public_key: bytes) -> None:
    from asyncgrpo_agent.store.audit import AuditLog

    now_unix_s = time.time()  # noqa: TID251 - a command reads the clock
    AuditLog(state_dir).record(event, now_unix_s, run=run, public_key=public_key.hex())


def _add_state_dir(parser: Parser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="state folder of the agent on this host")


def _state_dir(option: str | None) -> Path:
    given = option or os.environ.get(sources.STATE_DIR_VARIABLE)
    return Path(given).absolute() if given else sources.default_state_dir(os.environ)


_RUN_ACTIONS: Final[dict[str, Action]] = {"create": _create, "add": _add, "list": _list}
_JOIN_ACTIONS: Final[dict[str, Action]] = {"add-key": _add_key}
