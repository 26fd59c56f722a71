"""`drain NAME`: have one replica of a running proxy finish and go, said beside that proxy.

The order is a file in the proxy's state folder, which a proxy that runs reads within a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.errors import AgentError
from asyncgrpo_agent.flags import Parser

if TYPE_CHECKING:
    from asyncgrpo_agent.store.drain_orders import DrainAnswer

ANSWER_S: Final = 10.0
LOOK_EVERY_S: Final = 0.1
_DESCRIPTION: Final = """\
Have one replica finish and go: it gets nothing new, its rollouts end, and its agent exits 0.

Run it on the proxy's host (or the trainer's, with --embed-proxy), as the proxy's user. A server
that is reached by URL has no agent: it gets nothing new until the proxy starts again.
"""


def run(words: Sequence[str]) -> None:
    """Do what `words` say. Raises AgentError."""
    usage = "drain NAME [--run RUN] [--wait] [--timeout S] [--config FILE] [--state-dir DIR]"
    parser = Parser("drain", usage, _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="of the replica, as the fleet shows it")
    parser.add_argument("--run", metavar="RUN", default="", help="if several runs have that name")
    parser.add_argument("--wait", action="store_true", help="until it has gone")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=ANSWER_S,
        help=f"seconds in which the proxy has to answer; default: {ANSWER_S:g}",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file of the proxy")
    parser.add_argument("--state-dir", metavar="DIR", help="state folder of the proxy")
    options = parser.parse_args(list(words))
    import trio

    trio.run(drain, _state_dir(options), options)


def seconds(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


async def drain(state_dir: Path, options: argparse.Namespace) -> None:
    """Give the order, and say what came of it. Raises AgentError."""
    from asyncgrpo_agent.store import drain_orders

    now_unix_s = time.time()  # noqa: TID251 - the one clock of this command
    order = drain_orders.DrainOrder(
        replica=options.name, run=options.run, expires_unix_s=now_unix_s + options.timeout
    )
    try:
        order_id = drain_orders.give(state_dir, order)
    except FileNotFoundError as error:
        raise _nobody(state_dir, "no proxy has run with this state folder") from error
    except OSError as error:
        raise _unusable(state_dir, error) from error
    try:
        answer = await _first_answer(state_dir, order_id, options.timeout)
        if answer.fault:
            raise AgentError(answer.fault, where=f"proxy of {state_dir}", fix=answer.fix)
        _say(f"replica {options.name} of run {answer.run} drains", answer)
        if options.wait:
            answer = await _last_answer(state_dir, order_id, options.timeout)
            end = "runs nothing any more" if answer.stays else "has gone"
            sys.stderr.write(f"replica {options.name} of run {answer.run} {end}\n")
    finally:
        drain_orders.take_back(state_dir, order_id)
        drain_orders.forget_answer(state_dir, order_id)


async def _first_answer(state_dir: Path, order_id: str, timeout_s: float) -> DrainAnswer:
    import trio

    from asyncgrpo_agent.store import drain_orders

    with trio.move_on_after(timeout_s):
        return await _changed_answer(state_dir, order_id, None)
    if not drain_orders.take_back(state_dir, order_id):  # the proxy has just taken it
        with trio.move_on_after(timeout_s):
            return await _changed_answer(state_dir, order_id, None)
    raise _nobody(state_dir, f"no proxy answered within {timeout_s:g} s")


async def _last_answer(state_dir: Path, order_id: str, timeout_s: float) -> DrainAnswer:
    """The proxy writes it anew all the time, which shows that it still runs."""
    import trio

    from asyncgrpo_agent.store import drain_orders

    seen: tuple[int, ...] | None = ()
    while True:
        with trio.move_on_after(timeout_s) as scope:
            answer = await _changed_answer(state_dir, order_id, seen)
            if answer.done:
                return answer
            seen = drain_orders.answer_stamp(state_dir, order_id)
        if scope.cancelled_caught:
            raise _nobody(state_dir, f"the proxy has said nothing for {timeout_s:g} s")


async def _changed_answer(
    state_dir: Path, order_id: str, seen: tuple[int, ...] | None
) -> DrainAnswer:
    """An answer whose stamp is not `seen`. Raises AgentError if it cannot be read."""
    import trio

    from asyncgrpo_agent.store import drain_orders

    while True:
        try:
            stamp = drain_orders.answer_stamp(state_dir, order_id)
            if stamp != seen and (answer := drain_orders.read_answer(state_dir, order_id)):
                return answer
        except OSError as error:
            raise _unusable(state_dir, error) from error
        await trio.sleep(LOOK_EVERY_S)


def _say(what: str, answer: DrainAnswer) -> None:
    count = answer.in_flight
    running = f": {count} rollout{'' if count == 1 else 's'} in flight" if count else ""
    sys.stderr.write(f"{what}{running}\n")
    if answer.stays:
        sys.stderr.write("it has no agent: stop it yourself; a proxy that starts uses it again\n")


def _nobody(state_dir: Path, what: str) -> AgentError:
    fix = "Is the proxy up, and is this its state folder? Give it: --state-dir DIR"
    return AgentError(what, where=str(state_dir), fix=fix)


def _unusable(state_dir: Path, error: OSError) -> AgentError:
    fix = "Run the command as the user that the proxy runs as"
    return AgentError(f"cannot be used: {error.strerror}", where=str(state_dir), fix=fix)


def _state_dir(options: argparse.Namespace) -> Path:
    given = options.state_dir
    settings = (
        [sources.Setting(path="agent.state_dir", value=given, origin="--state-dir")]
        if given
        else []
    )
    return sources.load(role="proxy", file=options.config, settings=settings).state_dir
