"""`diag`: one archive for a report of a fault, from what this host knows of an agent.

Configuration without secrets, versions, doctor, logs, and the dumps of agents that run now. What
cannot be collected is said in `result.json`, and never stops the rest.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncgrpo_agent import dumps, host_commands, logs
from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import Config
from asyncgrpo_agent.errors import AgentError, ConfigError
from asyncgrpo_agent.flags import Parser, add_config_flags, settings_of
from asyncgrpo_agent.procs.environment import secret_values
from asyncgrpo_agent.store.audit import audit_file

DUMP_S: Final = 5.0
LOOK_EVERY_S: Final = 0.05
LOG_BYTES: Final = 512 << 10  # the end of each file
LOG_FILES: Final = 40  # the newest
DEPTH: Final = 3  # folders of a state folder in which agents of this host may have theirs
_ABOUT: Final = """\
Write one zip file that says what an agent of this host is and does: configuration, versions,
doctor, the ends of its logs, and of each agent that runs on the state folder its tasks with their
stacks, link, metrics and newest log lines. result.json in it says what could not be collected.

Secrets are left out, prompts and answers are not looked at; the logs of vLLM and TRL are as those
have written them, so look through it before you give it away.
"""

Files = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Collector:
    """One part: its files by name."""

    name: str
    files: Callable[[], Files]


def run(words: Sequence[str]) -> int:
    """The exit code: 0 also if some part could not be had, which the file says."""
    usage = "diag [--role ROLE] [--config FILE] [--state-dir DIR] [--output FILE] [flags]"
    parser = Parser("diag", usage, _ABOUT)
    add_config_flags(parser)
    parser.add_argument(
        "--output", metavar="FILE", help="default: asyncgrpo-diag-HOST-TIME.zip in this folder"
    )
    options = parser.parse_args(list(words))
    role = sources.chosen_role(options.role or os.environ.get(sources.ROLE_VARIABLE) or "proxy")
    logs.set_up(as_json=False, level="ERROR")
    logs.hide(*secret_values(os.environ))
    fault: ConfigError | None = None
    try:
        config = sources.load(role=role, file=options.config, settings=settings_of(options))
    except ConfigError as error:  # the rest may say why
        fault = error
        settings = [one for one in settings_of(options) if one.path == "agent.state_dir"]
        config = sources.load(role="proxy", file=None, settings=settings)
    logs.hide(*secret_values(config.engine.env))
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    output = Path(options.output or f"asyncgrpo-diag-{platform.node() or 'host'}-{now}.zip")
    _write(output, _collectors(config, fault))
    sys.stderr.write(f"wrote {output}\n")
    return 0


def _write(output: Path, collectors: Sequence[_Collector]) -> None:
    """Raises AgentError if the file cannot be written."""
    result = []
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for one in collectors:
            began, names, reason = time.monotonic(), [], ""
            try:
                for name, text in one.files():
                    file.writestr(name, logs.without_secrets(text))
                    names.append(name)
            except Exception as error:  # one part must not cost the others
                reason = logs.without_secrets(f"{type(error).__name__}: {error}")
            seconds = round(time.monotonic() - began, 2)
            row = {"name": one.name, "ok": not reason, "reason": reason}
            result.append({**row, "files": names, "seconds": seconds})
        file.writestr("result.json", json.dumps(result, indent=2) + "\n")
    try:
        with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(archive.getvalue())
    except OSError as error:
        raise AgentError(f"cannot be written: {error.strerror}", where=str(output)) from error


def _collectors(config: Config, fault: ConfigError | None) -> list[_Collector]:
    return [
        _Collector("config", lambda: _config(config, fault)),
        _Collector("versions", lambda: iter([("versions.txt", host_commands.version(["--all"]))])),
        _Collector("agents", lambda: _dumps(config.state_dir)),
        _Collector("logs", lambda: _logs(config)),
        _Collector("state", lambda: iter([("state.txt", _listing(config.state_dir))])),
        _Collector("doctor", lambda: _doctor(config, fault)),
    ]


def _config(config: Config, fault: ConfigError | None) -> Files:
    if fault is not None:
        raise fault
    import tomli_w

    yield "config.toml", tomli_w.dumps(config.redacted())
    yield "config-origins.json", json.dumps(dict(config.origins), indent=2)


def _doctor(config: Config, fault: ConfigError | None) -> Files:
    if fault is not None:
        raise fault
    import trio

    from asyncgrpo_agent import doctor

    rows = doctor.as_tables(trio.run(doctor.rows, config))
    yield "doctor.json", json.dumps(rows, indent=2)


def _dumps(state_dir: Path) -> Files:
    """Of all agents that run on this state folder, or on folders within it."""
    found = [one for folder in _dump_folders(state_dir) for one in dumps.running(folder)]
    silent = []
    for one in found:
        one.dump.unlink(missing_ok=True)
        os.kill(one.pid, dumps.SIGNAL)
        deadline = time.monotonic() + DUMP_S
        while not one.dump.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)  # noqa: TID251
        name = f"agents/{one.role}-{one.pid}"
        if one.dump.exists():
            yield f"{name}.txt", one.dump.read_text()
        else:
            silent.append(f"{one.role} (pid {one.pid})")
        yield f"{name}.threads.txt", one.threads.read_text()
    if silent:
        raise TimeoutError(f"no dump within {DUMP_S:g} s: {', '.join(silent)}")


def _dump_folders(state_dir: Path) -> Iterator[Path]:
    for depth in range(DEPTH):
        yield from sorted(state_dir.glob("*/" * depth + dumps.FOLDER))


def _logs(config: Config) -> Files:
    folders = [config.log_dir, config.state_dir / "trainer"]
    files = [path for folder in folders for path in folder.rglob("*.log") if path.is_file()]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[:LOG_FILES]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
        yield f"logs/{path.parent.name}-{path.name}", text
    audit = audit_file(config.state_dir)
    if audit.exists():
        yield "logs/audit.jsonl", audit.read_text()[-LOG_BYTES:]


def _listing(state_dir: Path) -> str:
    """Names, sizes and ages of what is in the state folder, never a content."""
    now = time.time()  # noqa: TID251 - ages of files
    lines = []
    for path in sorted(state_dir.rglob("*"))[:5000]:
        try:
            stat = path.lstat()
        except OSError:
            continue
        facts = f"{stat.st_mode:07o} {stat.st_size:12} {now - stat.st_mtime:10.0f} s"
        lines.append(f"{facts}  {path.relative_to(state_dir)}")
    return "\n".join(lines) + "\n"
