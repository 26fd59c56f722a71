"""Orders to drain a replica, from a command to the proxy that runs beside it: files in
`<state>/proxy/drain/`.

The command writes an order, the proxy takes it away and writes an answer, anew each second until
the replica has gone; the command removes the answer when it has read enough. Whoever removes an
order has it: the proxy obeys it, or the command has given up on it. An order ends by its own time,
so that one whose command was killed drains nobody later. All of it is forgotten when a proxy
starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.store.private_files import private_folder

_ORDER: Final = ".order"
_ANSWER: Final = ".answer"


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which replica; an empty run is the only one that has a replica of that name."""

    replica: str
    run: str = ""
    expires_unix_s: float


class DrainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy did, or with a `fault` why it did nothing."""

    run: str = ""
    in_flight: int = 0  # rollouts that it still runs
    done: bool = False  # it has gone, or it is an upstream and runs nothing any more
    stays: bool = False  # an upstream, which nobody here can end
    fault: str = ""
    fix: str = ""


def orders_folder(state_dir: Path) -> Path:
    return state_dir / "proxy" / "drain"


def open_folder(state_dir: Path) -> None:
    """For a proxy that starts: an empty folder. Raises OSError."""
    folder = private_folder(orders_folder(state_dir))
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def give(state_dir: Path, order: DrainOrder) -> str:
    """Leave an order there; gives its id. Raises OSError, if no proxy has made the folder."""
    order_id = secrets.token_hex(8)
    _replace(orders_folder(state_dir) / f"{order_id}{_ORDER}", order)
    return order_id


def take_back(state_dir: Path, order_id: str) -> bool:
    """Whether the order was still there, so that nobody obeys it."""
    try:
        (orders_folder(state_dir) / f"{order_id}{_ORDER}").unlink()
    except FileNotFoundError:
        return False
    return True


def take_all(state_dir: Path, now_unix_s: float) -> Iterator[tuple[str, DrainOrder | DrainAnswer]]:
    """The orders that have come, by their ids; for one that cannot be read what to answer.

    Raises OSError if the folder cannot be read.
    """
    for path in sorted(orders_folder(state_dir).glob(f"*{_ORDER}")):
        order_id = path.name.removesuffix(_ORDER)
        found = _read(path)
        if not take_back(state_dir, order_id):
            continue  # its command has given up
        if isinstance(found, DrainOrder) and found.expires_unix_s < now_unix_s:
            continue
        yield order_id, found


def _read(path: Path) -> DrainOrder | DrainAnswer:
    try:
        return msgspec.json.decode(path.read_bytes(), type=DrainOrder)
    except (OSError, msgspec.MsgspecError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        fix = "Give it as the user that the proxy runs as, with the same version of the agent"
        return DrainAnswer(fault=f"the proxy cannot read the order: {what}", fix=fix)


def answer(state_dir: Path, order_id: str, given: DrainAnswer) -> None:
    """Raises OSError."""
    _replace(orders_folder(state_dir) / f"{order_id}{_ANSWER}", given)


def is_awaited(state_dir: Path, order_id: str) -> bool:
    """Whether the answer is still there; a command that has read enough removes it."""
    return (orders_folder(state_dir) / f"{order_id}{_ANSWER}").exists()


def answer_stamp(state_dir: Path, order_id: str) -> tuple[int, ...] | None:
    """Differs after every answer; None while there is none. Raises OSError."""
    try:
        found = (orders_folder(state_dir) / f"{order_id}{_ANSWER}").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_answer(state_dir: Path, order_id: str) -> DrainAnswer | None:
    """The answer so far. Raises OSError."""
    try:
        text = (orders_folder(state_dir) / f"{order_id}{_ANSWER}").read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(text, type=DrainAnswer)


def forget_answer(state_dir: Path, order_id: str) -> None:
    with suppress(OSError):  # the next proxy removes it
        (orders_folder(state_dir) / f"{order_id}{_ANSWER}").unlink(missing_ok=True)


def _replace(path: Path, value: msgspec.Struct) -> None:
    """In one step, so that nobody reads a part. Not synced: a crash forgets it anyway."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
    os.replace(fresh, path)
