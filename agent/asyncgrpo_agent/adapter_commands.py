"""`adapters [RUN]` and `adapters get RUN DIR`: see a run's adapters, take one home.

They read the bucket, as an agent does, or ask the proxy of a join, and on the trainer's host they
read the run's history. They change nothing but the folder that they are told to write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapters import is_attempt, is_run_name, parse_commit_key
from asyncgrpo_agent.flags import Parser, add_config_flags, settings_of
from asyncgrpo_agent.tables import table

if TYPE_CHECKING:
    from asyncgrpo_agent.core.adapter_log import AdapterLog, ReplicaTimes
    from asyncgrpo_agent.roles.adapter_reader import Found, RunAdapters

_PLACE: Final = ("--join", "--proxy", "--bucket", "--bucket-url", "--state-dir")
_WORDS: Final = ("newest", "best", "final")
_REPLICA_TIMES: Final = ("visible_s", "copied_s", "verified_s", "loaded_s", "acked_s")
_TIMES: Final = ("uploaded_s", "announced_s", *_REPLICA_TIMES)
_UNITS: Final = ("B", "kB", "MB", "GB")
_ABOUT: Final = """\
Show the versions of a run's adapter that are in the bucket, the newest last.

  adapters [RUN]          RUN defaults to the run of the join, or to the only one in the bucket
  adapters get RUN DIR    take one home, as a folder that PEFT loads; see adapters get --help

With a join and without a bucket, or with --over-link, the proxy is asked, which has the versions in
use.
"""
_COLUMNS: Final = """\
A version is live while rollouts may still name it. Who holds it, and the times, are from the
history on the trainer's host: `saved` is when TRL handed the adapter over, all others are seconds
since then, of several replicas that of the last to ack. An adapter is uploaded once its commit is
written, announced once the proxy was told; a replica has found it (visible), copied it, verified
it, loaded it into vLLM, and the trainer has heard of that (acked). --json has each replica's times.
"""
_CHOICES: Final = """\
VERSION is a number, or
  newest   the newest that can be read; the default
  best     on the trainer's host: of the versions that were evaluated, the most accurate; if none
           was, the one with the highest training reward, as the mean over all steps that trained
           on samples of this version, the two before and the two after it
  final    what the run has ended with, of the last attempt that did; of a proxy, on the trainer's
           host only
The adapter is checked as a replica checks it: the signature of the run's key, sizes, hashes, and
that it is a LoRA as its commit says. The key is that of the join, or that which the state folder
has for the run. With a join and without a bucket, or with --over-link, the adapter comes from the
proxy, which has the versions in use.
"""


def run(words: Sequence[str]) -> tuple[str, str]:
    """Do what `words` say; gives what is to be written and where: a file, or "-"."""
    if words[:1] == ["get"]:
        return _get(words[1:])
    return _list(words)


def _run_name(text: str) -> str:
    if not is_run_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a run")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _version(text: str) -> int | str:
    if text in _WORDS:
        return text
    if not re.fullmatch(r"v?[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor {', '.join(_WORDS)}")
    return int(text.removeprefix("v"))


def _attempt(text: str) -> str:
    if not is_attempt(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no attempt such as a0003-7f3c")
    return text


def _add_place(parser: Parser) -> None:
    parser.add_argument(
        "--over-link", action="store_true", help="ask the proxy of the join, not the bucket"
    )
    add_config_flags(parser, only=_PLACE)


def _config(options: argparse.Namespace) -> Config:
    """Of any agent of the run: its bucket, its join and its state folder."""
    from asyncgrpo_agent import logs
    from asyncgrpo_agent.roles.adapter_sources import with_join

    # What the role of an agent needs beyond the bucket is not asked for.
    config = sources.load(role="proxy", file=options.config, settings=settings_of(options))
    logs.set_up(as_json=config.agent.log_json, level="ERROR")  # the command's error says the rest
    return with_join(config, sys.stdin)


# --- list ------------------------------------------------------------------------------------


def _list(words: Sequence[str]) -> tuple[str, str]:
    usage = (
        "adapters [RUN] [--limit N] [--json] [--over-link] [--bucket DIR] [--join FILE]\n"
        "         [--config FILE] ..."
    )
    parser = Parser("adapters", usage, _ABOUT, _COLUMNS)
    parser.add_argument("run", metavar="RUN", nargs="?", type=_run_name)
    parser.add_argument(
        "--limit", metavar="N", type=_count, default=20, help="show so many; default: 20"
    )
    parser.add_argument("--json", action="store_true", help="show a JSON list")
    _add_place(parser)
    options = parser.parse_args(list(words))
    import trio

    from asyncgrpo_agent.roles import adapter_reader
    from asyncgrpo_agent.roles.adapter_sources import goes_over_link

    config = _config(options)
    over_link = goes_over_link(config, options.over_link)
    look = partial(adapter_reader.list_adapters, over_link=over_link)
    seen = trio.run(look, config, options.run or "", options.limit)
    rows = [_row(found, seen) for found in seen.found]
    if options.json:
        return json.dumps(rows, indent=1) + "\n", "-"
    return table([_shown(row) for row in rows], "no adapters", _notes(seen, rows)), "-"


def _row(found: Found, seen: RunAdapters) -> dict[str, Any]:
    parts = parse_commit_key(found.key)
    assert parts is not None, "it was listed as one"
    row: dict[str, Any] = {"run": seen.run, "attempt": parts.attempt, "version": parts.version}
    commit = found.commit
    adapter = found.adapter if commit is None else commit.adapter
    if adapter is None:
        return row | {"problem": found.problem}
    signature = "not there" if commit is None else "verified" if seen.verified else "unverified"
    holders = {} if found.held_by is None else {"held_by": found.held_by}
    return row | {
        "adapter": adapter.name,
        "digest": adapter.digest[:12],
        "size_bytes": None if commit is None else commit.total_bytes,
        "created": None if commit is None else _time(commit.created_unix_s),
        "signature": signature,
        "live": adapter.name in _live(seen),
        **_history(seen.log, adapter.name),
        **holders,
    }


def _live(seen: RunAdapters) -> list[str]:
    """As the proxy or the history says, else as the newest commit does."""
    if seen.live is not None:
        return seen.live
    for found in reversed(seen.found):
        if found.commit is not None:
            recorded = seen.log.live(found.commit.attempt) if seen.log else None
            is_told = [*found.commit.live, found.commit.adapter.name]
            return is_told if recorded is None else recorded
    return []


def _history(log: AdapterLog | None, name: str) -> dict[str, Any]:
    if log is None:
        return {"held_by": None, "saved": None, **dict.fromkeys(_TIMES), "replicas": []}
    times = log.times(name)
    return {
        "held_by": log.holders(name),
        "saved": _time(times.saved_unix_s, "milliseconds"),
        "uploaded_s": _seconds(times.uploaded_s),
        "announced_s": _seconds(times.announced_s),
        **_replica_times(times.slowest()),
        "replicas": [
            {"name": one.replica, "ok": one.ok, "reason": one.reason, **_replica_times(one)}
            for one in times.replicas
        ],
    }


def _replica_times(times: ReplicaTimes | None) -> dict[str, float | None]:
    return {name: _seconds(getattr(times, name, None)) for name in _REPLICA_TIMES}


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _time(unix_s: float | None, precision: str = "seconds") -> str | None:
    if unix_s is None:
        return None
    text = datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(timespec=precision)
    return f"{text}Z"


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row for a terminal."""
    is_read = "problem" not in row
    saved = row.get("saved")
    return {
        "attempt": row["attempt"],
        "version": row["version"],
        "digest": row.get("digest"),
        "size": _size(row["size_bytes"]) if row.get("size_bytes") else None,
        "created": row.get("created"),
        "signature": row["signature"] if is_read else "unreadable",
        "live": ("yes" if row["live"] else "no") if is_read else None,
        "held_by": ",".join(row.get("held_by") or ()),
        "saved": saved.partition("T")[2].rstrip("Z") if saved else None,
        **{name.removesuffix("_s"): _offset(row.get(name)) for name in _TIMES},
    }


def _offset(seconds: float | None) -> str | None:
    return None if seconds is None else f"+{seconds:.2f}"


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


def _notes(seen: RunAdapters, rows: Sequence[dict[str, Any]]) -> list[str]:
    notes = [f"v{row['version']}: {row['problem']}" for row in rows if "problem" in row]
    if not seen.verified:
        notes.append(f"unverified: no join and no key of run {seen.run} is on this host")
    if seen.proxy:
        notes.append(f"from the proxy {seen.proxy}, which has the versions in use only")
    if any(row.get("signature") == "not there" for row in rows):
        notes.append("not there: the proxy knows of it; `adapters get` has the trainer bring it")
    if seen.log is None:
        what = "the times" if seen.proxy else "who holds them, and the times,"
        notes.append(f"{what} are known on the trainer's host")
    return notes


# --- get -------------------------------------------------------------------------------------


def _get(words: Sequence[str]) -> tuple[str, str]:
    usage = (
        "adapters get RUN [--version VERSION] DIR [--attempt ATTEMPT] [--unverified]\n"
        "         [--over-link] [--bucket DIR] [--join FILE] [--config FILE] ..."
    )
    about = (
        "Take an adapter home: write it to DIR, as PEFT saved it. DIR must be empty or not there."
    )
    parser = Parser("adapters get", usage, about, _CHOICES)
    parser.add_argument("run", metavar="RUN", type=_run_name, help="name of the run")
    parser.add_argument("folder", metavar="DIR", help="where to write it")
    parser.add_argument(
        "--version", metavar="VERSION", type=_version, default="newest", help="which; see below"
    )
    parser.add_argument(
        "--attempt",
        metavar="ATTEMPT",
        type=_attempt,
        help="start of the trainer, as a0003-7f3c; default: the newest that published",
    )
    parser.add_argument("--unverified", action="store_true", help="do not check the signature")
    _add_place(parser)
    options = parser.parse_args(list(words))
    import trio

    from asyncgrpo_agent.roles import adapter_copies
    from asyncgrpo_agent.roles.adapter_sources import goes_over_link

    config = _config(options)
    over_link = goes_over_link(config, options.over_link)

    async def take() -> adapter_copies.Taken:
        return await adapter_copies.take_home(
            config,
            options.run,
            Path(options.folder).absolute(),
            version=options.version,
            attempt=options.attempt or "",
            unverified=options.unverified,
            over_link=over_link,
        )

    taken = trio.run(take)
    signed = "signed with the run's key" if taken.verified else "signature NOT checked"
    facts = [_size(taken.size_bytes), signed, *([taken.reason] if taken.reason else [])]
    sys.stderr.write(f"wrote {options.folder}: {taken.name} ({'; '.join(facts)})\n")
    return "", "-"
