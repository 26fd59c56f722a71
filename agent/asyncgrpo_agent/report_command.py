"""`report RUN`: one self-contained page about a run, and its charts as images.

It reads the history that the trainer's agent keeps on its host, or the copy in the bucket, which is
there when all hosts are gone. It asks nobody and changes nothing but the files that it is told to
write.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncgrpo_agent import __version__
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.core.adapters import is_run_name
from asyncgrpo_agent.errors import AgentError, UsageError
from asyncgrpo_agent.flags import PROGRAM, Parser, add_config_flags, settings_of

if TYPE_CHECKING:
    from asyncgrpo_agent.report.figures import Figure
    from asyncgrpo_agent.report.run import Run

PAGE: Final = "report.html"
SHEET: Final = "charts"
COLUMNS: Final = 2
_PLACE: Final = ("--bucket", "--bucket-url", "--state-dir")
_ABOUT: Final = """\
Write a report of a run: one HTML page with verdict, facts, charts and tables, that needs no
network and no proxy and can be printed; with --png each chart as an image too, and all on a sheet.

RUN defaults to the only one that is there. On the trainer's host its own history is read. With
--bucket or --bucket-url it is the bucket's, which has all starts of the trainer on whatever host,
also after the run has ended.
"""
_NOTES: Final = """\
The trainer copies its history into the bucket once in a minute or a few, so that a run that goes on
is shown up to then. It is not signed: whoever can write to the bucket can write history.
"""


def run(words: Sequence[str]) -> None:
    """Do what `words` say. Raises AgentError."""
    usage = (
        "report [RUN] [--output DIR|FILE.html] [--png] [--bucket DIR | --bucket-url URL]\n"
        "         [--state-dir DIR] [--config FILE]"
    )
    parser = Parser("report", usage, _ABOUT, _NOTES)
    parser.add_argument("run", metavar="RUN", nargs="?", type=_run_name)
    parser.add_argument(
        "--output", metavar="DIR|FILE.html", help="where to write it; default: RUN-report"
    )
    parser.add_argument("--png", action="store_true", help="write the charts as PNG images, too")
    add_config_flags(parser, only=_PLACE)
    options = parser.parse_args(list(words))
    from asyncgrpo_agent import logs

    config = sources.load(role="proxy", file=options.config, settings=settings_of(options))
    logs.set_up(as_json=config.agent.log_json, level="ERROR")  # the command's error says the rest
    found = _read(config, options.run or "")
    _write(found, _output(options.output, found.name), with_png=options.png)


def _run_name(text: str) -> str:
    if not is_run_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a run")
    return text


# --- reading ---------------------------------------------------------------------------------


def _read(config: Config, name: str) -> Run:
    """The bucket's history if a bucket is named, else this host's. Raises AgentError."""
    import trio

    from asyncgrpo_agent.report.run import Run
    from asyncgrpo_agent.roles import history_source

    found = Run()
    if config.bucket.path or config.bucket.url:
        where = config.bucket.url or config.bucket.path
        name = name or _only(trio.run(history_source.recorded_runs, config), where)
        trio.run(history_source.fold_bucket, config, name, found.add)
    else:
        where = str(config.state_dir)
        name = name or _only(history_source.local_runs(config.state_dir), where)
        path = history_source.local_history(config.state_dir, name)
        if path is not None:
            found.add_all(history_source.read_local(path))
    if not found.records:
        raise AgentError(
            f"has no history of run {name}",
            where=where,
            fix="See whether this is the right place: --bucket DIR, --bucket-url URL, or"
            " --state-dir DIR on the trainer's host",
        )
    found.name = found.name or name
    return found


def _only(runs: Sequence[str], where: str) -> str:
    if not runs:
        fix = "Give --bucket DIR, --bucket-url URL, or --state-dir DIR on the trainer's host"
        raise AgentError("has no history of any run", where=where, fix=fix)
    if len(runs) > 1:
        raise UsageError(f"has {len(runs)} runs: {', '.join(runs)}", where=where, fix="Name one")
    return runs[0]


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the page goes, and what the images' paths begin with."""

    page: Path
    images: str


def _output(given: str | None, name: str) -> Output:
    path = Path(os.path.abspath(given or f"{name}-report"))
    if path.suffix.lower() in (".html", ".htm"):
        return Output(page=path, images=f"{path.with_suffix('')}-")
    return Output(page=path / PAGE, images=f"{path}/")


def _write(found: Run, output: Output, *, with_png: bool) -> None:
    from asyncgrpo_agent.report.figures import figures
    from asyncgrpo_agent.report.page import page

    shown = figures(found)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")  # noqa: TID251 - the command's clock
    made = f"Made by {PROGRAM} {__version__} on {now} from {found.records:,} records."
    files = {output.page: page(found, shown, made=made).encode()}
    if with_png:
        files |= _images(shown, output.images)
    try:
        output.page.parent.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            path.write_bytes(data)
    except OSError as error:
        where = str(error.filename or output.page)
        raise AgentError(f"cannot be written: {error.strerror}", where=where) from error
    images = f" and {len(files) - 1} images" if with_png else ""
    sys.stderr.write(f"wrote {output.page}{images}\n")


def _images(shown: Sequence[Figure], prefix: str) -> dict[Path, bytes]:
    from asyncgrpo_agent.report.charts import draw
    from asyncgrpo_agent.report.png import images

    if not shown:
        return {}
    single, sheet = images([draw(figure.chart) for figure in shown], COLUMNS)
    names = [figure.name for figure in shown]
    found = dict(zip(names, single, strict=True)) | {SHEET: sheet}
    return {Path(f"{prefix}{name}.png"): data for name, data in found.items()}
