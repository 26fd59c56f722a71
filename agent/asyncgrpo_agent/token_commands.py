"""`token create|list|revoke`: the commands that decide who may join, run beside the proxy.

They change files of the proxy's state folder only; a proxy that runs notices within a second. A
token is shown once, inside the join line that `create` makes, and by nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import Config, host_port
from asyncgrpo_agent.errors import UsageError
from asyncgrpo_agent.flags import Action, Parser, act
from asyncgrpo_agent.run_commands import exposed_notes
from asyncgrpo_agent.tables import table

if TYPE_CHECKING:
    from asyncgrpo_agent.store.tokens import TokenFacts

_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86400}
_DESCRIPTION: Final = """\
Decide who may join: make join lines, list their tokens, revoke them.

  token create --role replica|trainer --run NAME    make a join line
  token create --role viewer [--run NAME]           the same, for somebody who looks on
  token list                                        show every token, never the secret
  token revoke ID                                   end one, and the links that are up on it
"""
_KEYLESS: Final = """\
run {run}: its private key is not on this host, so the join line lacks it and trains nothing yet.
Complete it where `asyncgrpo-agent run create {run}` ran: asyncgrpo-agent join add-key FILE
"""


def run(words: Sequence[str]) -> tuple[str, str]:
    """Do what `words` say; gives what is to be written and where: a file, or "-"."""
    return act("token", _DESCRIPTION, _ACTIONS, words)


def duration_s(text: str) -> float:
    """Seconds in "7d", "12h" or "90m"."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 7d, 12h or 90m")
    return float(match[1]) * _UNIT_S[match[2]]


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


# --- create ----------------------------------------------------------------------------------


def _create(words: Sequence[str]) -> tuple[str, str]:
    usage = (
        "token create --role replica|trainer|viewer --run NAME [--address HOST:PORT ...]\n"
        "         [--rollouts] [--expires 7d] [--uses N] [--config FILE] [--state-dir DIR]\n"
        "         [--output FILE]"
    )
    parser = Parser(
        "token create", usage, "Make a join line: one secret line that lets one role join."
    )
    parser.add_argument("--role", choices=["replica", "trainer", "viewer"], required=True)
    parser.add_argument(
        "--run", metavar="NAME", help="name of the run; a viewer without one sees all runs"
    )
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="a viewer sees sampled rollouts as well, which are people's prompts and data",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        nargs="+",
        action="extend",
        default=[],
        help="where agents dial the proxy; default: proxy.public_addresses",
    )
    parser.add_argument(
        "--expires",
        metavar="7d",
        type=duration_s,
        help="end it after so many days, hours (12h) or minutes (90m); default: never",
    )
    parser.add_argument(
        "--uses",
        metavar="N",
        type=_count,
        help="processes that it lets in, each as often as it dials; of a viewer, logins and"
        " connections of scripts; default: any number",
    )
    _add_place(parser)
    parser.add_argument("--output", metavar="FILE", help="write it there; default: standard output")
    options = parser.parse_args(list(words))
    return _join_line(options) + "\n", options.output or "-"


def _join_line(options: argparse.Namespace) -> str:
    from asyncgrpo_agent.core.join import decode
    from asyncgrpo_agent.store import identity, tokens

    if options.role != "viewer" and options.run is None:
        raise UsageError(f"--run is missing: a {options.role} is of one run")
    if options.role != "viewer" and options.rollouts:
        raise UsageError("--rollouts is for role viewer")
    for address in options.address:
        try:
            host_port(address)
        except ValueError as error:
            raise UsageError(f"--address {address}: {error}") from error
    config = _config(options)
    line = identity.create_join(
        config.state_dir,
        role=options.role,
        run=tokens.ALL_RUNS if options.run is None else options.run,
        addresses=options.address or config.proxy.public_addresses,
        now_unix_s=_now_unix_s(),
        life_s=options.expires,
        uses=options.uses,
        rollouts=options.rollouts,
    )
    if options.role == "trainer" and decode(line).run_private_key is None:
        sys.stderr.write(_KEYLESS.format(run=options.run))
    return line


# --- list and revoke -------------------------------------------------------------------------


def _list(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "token list",
        "token list [--json] [--config FILE] [--state-dir DIR]",
        "Show every token that was made here, oldest first; never the secret itself.",
    )
    parser.add_argument("--json", action="store_true", help="show a JSON list")
    _add_place(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store import identity, tokens

    now_unix_s, state_dir = _now_unix_s(), _config(options).state_dir
    rows = [_row(facts, now_unix_s) for facts in tokens.list_tokens(state_dir)]
    if options.json:
        return json.dumps(rows, indent=1) + "\n", "-"
    return table(rows, "no tokens", exposed_notes(identity.runs_exposed(state_dir))), "-"


def _row(facts: TokenFacts, now_unix_s: float) -> dict[str, Any]:
    return {
        "id": facts.id,
        "role": facts.role,
        "run": facts.run,
        "scopes": ",".join(facts.scopes),
        "created": _time(facts.created_unix_s),
        "expires": _time(facts.expires_unix_s),
        "uses_left": facts.uses_left,
        "last_used": _time(facts.last_used_unix_s),
        "ended": facts.ended(now_unix_s),
    }


def _time(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _revoke(words: Sequence[str]) -> tuple[str, str]:
    parser = Parser(
        "token revoke",
        "token revoke ID [--config FILE] [--state-dir DIR]",
        "End a token: nobody joins with it any more, and links that are up on it are closed.",
    )
    parser.add_argument("id", metavar="ID", help="as `token list` shows it")
    _add_place(parser)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent.store.tokens import ALL_RUNS, revoke_token

    state_dir = _config(options).state_dir
    facts = revoke_token(state_dir, options.id, now_unix_s=_now_unix_s())
    of = "all runs" if facts.run == ALL_RUNS else f"run {facts.run}"
    sys.stderr.write(f"token {facts.id} ({facts.role} of {of}) revoked\n")
    return "", "-"


# --- the proxy's state -----------------------------------------------------------------------


def _add_place(parser: Parser) -> None:
    parser.add_argument("--config", metavar="FILE", help="configuration file of the proxy")
    parser.add_argument("--state-dir", metavar="DIR", help="state folder of the proxy")


def _config(options: argparse.Namespace) -> Config:
    """The proxy's configuration, for its state folder and its public addresses."""
    given = options.state_dir
    settings = (
        [sources.Setting(path="agent.state_dir", value=given, origin="--state-dir")]
        if given
        else []
    )
    return sources.load(role="proxy", file=options.config, settings=settings)


def _now_unix_s() -> float:
    return time.time()  # noqa: TID251 - the one clock of these commands


_ACTIONS: Final[dict[str, Action]] = {
    "create": _create,
    "list": _list,
    "revoke": _revoke,
}
