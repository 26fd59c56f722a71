"""`status`, `logs` and `rollouts tail`: what the proxy shows to the holder of a viewer's join.

They ask the proxy's API over one connection that they dial, from any host, and change nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.errors import EXIT_FAILURE, AgentError, ConfigError, LinkError, UsageError
from asyncgrpo_agent.flags import Parser, add_config_flags, settings_of

if TYPE_CHECKING:
    from rich.console import Console

    from asyncgrpo_agent.config.sections import Config
    from asyncgrpo_agent.core.event_stream import ServerEvent
    from asyncgrpo_agent.core.join import Join
    from asyncgrpo_agent.roles.viewing import Viewing

REDRAW_S: Final = 2.0
AGAIN_S: Final = 2.0  # after the proxy was lost
KINDS: Final = ("replica", "trainer", "sync", "run", "alert", "proxy", "security")
_ALL: Final = "*"
_PLACE: Final = ("--join", "--proxy")
_WHO: Final = "The join is a viewer's: token create --role viewer, on the proxy's host.\n"
_STATUS: Final = f"""\
Show a run: what holds it up, alerts, replicas, syncs, routing, events; or all runs, a line each.

{_WHO}"""
_EXIT: Final = """\
Exit codes: 0 all shown runs are well or finished, 1 one is not (or the proxy is out of reach), 2
usage, 78 the token does not do. A run is not well if its trainer is away or has failed, no replica
is ready, too many are lost, or an alert of severity error stands.
"""
_LOGS: Final = f"""\
Show what happened in a run, the newest last: joins, losses, syncs, refusals, alerts, resumes.

{_WHO}"""
_ROLLOUTS: Final = f"""\
Show rollouts to read: prompt, answer, rewards, version and replica, the newest last.

There are some if the trainer is told to give any (trainer.sample_rollouts), for tokens made with
--rollouts. {_WHO}"""

Show = Callable[["Viewing", str], Awaitable[int]]


def status(words: Sequence[str]) -> int:
    """The exit code."""
    parser = _parser("status", "[--watch] [--json]", _STATUS, _EXIT)
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    options = parser.parse_args(list(words))
    return _run(options, partial(_status, as_json=options.json), watch=options.watch, one=False)


def logs(words: Sequence[str]) -> int:
    """The exit code."""
    parser = _parser("logs", "[--follow] [--limit N] [--kind KIND] [--json]", _LOGS)
    _add_following(parser, 50)
    parser.add_argument("--kind", choices=KINDS, default="", help=", ".join(KINDS))
    options = parser.parse_args(list(words))
    show = _Logs(options).show
    return _run(options, show, watch=options.follow, one=True)


def rollouts(words: Sequence[str]) -> int:
    """The exit code."""
    if list(words[:1]) != ["tail"] and not {"-h", "--help"} & set(words):
        raise UsageError("the action comes first", fix="Try `asyncgrpo-agent rollouts tail`")
    parser = _parser("rollouts tail", "[--follow] [--limit N] [--json]", _ROLLOUTS)
    _add_following(parser, 10)
    options = parser.parse_args([word for word in words if word != "tail"])
    show = _Rollouts(options).show
    return _run(options, show, watch=options.follow, one=True)


def _parser(command: str, usage: str, about: str, epilog: str = "") -> Parser:
    tail = "[--join FILE] [--proxy HOST:PORT] [--config FILE]"
    parser = Parser(command, f"{command} [RUN] {usage} {tail}", about, epilog)
    help_text = "name of the run; default: that of the join, or the only one"
    parser.add_argument("run", metavar="RUN", nargs="?", type=_run_name, help=help_text)
    parser.add_argument("--json", action="store_true", help="JSON, a line each")
    add_config_flags(parser, only=_PLACE)
    return parser


def _add_following(parser: Parser, limit: int) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="and what comes, until Ctrl-C")
    help_text = f"show so many; default: {limit}"
    parser.add_argument("--limit", metavar="N", type=_count, default=limit, help=help_text)


def _run_name(text: str) -> str:
    if not is_run_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a run")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


# --- the connection --------------------------------------------------------------------------


def _run(options: argparse.Namespace, show: Show, *, watch: bool, one: bool) -> int:
    """Dial the proxy and show it; while somebody watches, dial again whenever it is lost."""
    import trio

    from asyncgrpo_agent import logs as logging
    from asyncgrpo_agent.roles.viewing import viewer_join

    config = sources.load(role="proxy", file=options.config, settings=settings_of(options))
    logging.set_up(as_json=False, level="ERROR")  # the command's error says the rest
    join = viewer_join(config, sys.stdin)
    return trio.run(_show, config, join, show, watch, options.run or "", one)


async def _show(config: Config, join: Join, show: Show, watch: bool, wanted: str, one: bool) -> int:
    import trio

    from asyncgrpo_agent.roles.viewing import viewing

    was_up = False
    while True:
        try:
            async with viewing(config, join) as viewer:
                name = await _chosen(viewer, join, wanted, one=one)
                was_up = True
                code = await show(viewer, name)
                while watch:  # a show that follows never comes to its end
                    await trio.sleep(REDRAW_S)
                    code = await show(viewer, name)
                return code
        except AgentError as error:
            # What never was there does not heal, nor a token that has ended. A run that a new proxy
            # does not know is known again when its agents have dialled.
            if not (watch and was_up) or isinstance(error, ConfigError):
                raise
            sys.stderr.write(f"{error}; dialling again\n")
            await trio.sleep(AGAIN_S)


async def _chosen(viewer: Viewing, join: Join, wanted: str, *, one: bool) -> str:
    """The run to show; "" is all. Raises UsageError."""
    if wanted or join.run != _ALL:
        return wanted or join.run
    names = [row["name"] for row in (await viewer.get("/api/runs"))["runs"]]
    if len(names) == 1:
        return str(names[0])
    if not one:
        return ""
    found = ", ".join(sorted(names)) or "none yet"
    raise UsageError("which run?", where=viewer.link.peer, fix=f"Name one of them: {found}")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


# --- what is shown ---------------------------------------------------------------------------


async def _status(viewer: Viewing, name: str, *, as_json: bool) -> int:
    from asyncgrpo_agent import status_view
    from asyncgrpo_agent.core import health

    if name:
        names = [name]
    else:
        rows = (await viewer.get("/api/runs"))["runs"]
        names = [row["name"] for row in rows]
    shown = [await viewer.get(f"/api/runs/{quote(one)}") for one in names]
    faults = [health.faults(one) for one in shown]
    if as_json:
        for one, wrong in zip(shown, faults, strict=True):
            _print_json({**one, "healthy": not wrong, "faults": wrong})
    else:
        console = _console()
        if console.is_terminal:
            console.clear()
        if name:
            console.print(status_view.run(shown[0], faults[0]))
        else:
            console.print(status_view.runs([one["run"] for one in shown]))
    return EXIT_FAILURE if any(faults) else 0


class _Logs:
    """What was printed is not printed again when the proxy was lost meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = _console()
        self._seen = 0  # number of an event

    async def show(self, viewer: Viewing, name: str) -> int:
        options, path = self._options, f"/api/runs/{quote(name)}"
        seq = await self._newest(viewer, path)
        answer = await viewer.get(f"{path}/events?limit={options.limit}&kind={options.kind}")
        for row in reversed(answer["events"]):
            self._print(row)
        if options.follow:
            await viewer.follow(f"{path}/live?seq={seq}", self._take)
            raise LinkError("the proxy ended the stream", where=viewer.link.peer)
        return 0

    def _take(self, event: ServerEvent) -> None:
        if event.kind == "note":
            self._print(json.loads(event.data))

    async def _newest(self, viewer: Viewing, path: str) -> int:
        rows = (await viewer.get(f"{path}/events?limit=1"))["events"]
        return int(rows[0]["seq"]) if rows else 0

    def _print(self, row: dict[str, Any]) -> None:
        from asyncgrpo_agent import status_view

        if row["seq"] > self._seen and self._options.kind in ("", row["kind"]):
            self._seen = row["seq"]
            _print(self._console, row, status_view.event(row), as_json=self._options.json)


class _Rollouts:
    """The same for rollouts, which have no numbers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = _console()
        self._seen_unix_s = 0.0

    async def show(self, viewer: Viewing, name: str) -> int:
        path = f"/api/runs/{quote(name)}"
        found = (await viewer.get(f"{path}/rollouts?limit={self._options.limit}"))["rollouts"]
        for row in reversed(found):
            self._print(row)
        if not found:
            sys.stderr.write("no rollout yet: see trainer.sample_rollouts on the trainer's host\n")
        if self._options.follow:
            await viewer.follow(f"{path}/live", self._take)
            raise LinkError("the proxy ended the stream", where=viewer.link.peer)
        return 0

    def _take(self, event: ServerEvent) -> None:
        if event.kind == "rollout":
            self._print(json.loads(event.data))

    def _print(self, row: dict[str, Any]) -> None:
        from asyncgrpo_agent import status_view

        if row["t_unix_s"] > self._seen_unix_s:
            self._seen_unix_s = row["t_unix_s"]
            _print(self._console, row, status_view.rollout(row), as_json=self._options.json)


def _print(console: Console, row: dict[str, Any], shown: Any, *, as_json: bool) -> None:
    if as_json:
        _print_json(row)
    else:
        console.print(shown)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
