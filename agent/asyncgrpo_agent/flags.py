"""The flags that configure an agent, and the parser that they are added to.

A flag sets one key of the configuration as text; what the text means is up to `config.values`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from asyncgrpo_agent.config.sections import ROLES
from asyncgrpo_agent.config.sources import ROLE_VARIABLE, Setting
from asyncgrpo_agent.errors import UsageError

PROGRAM: Final = "asyncgrpo-agent"

Action = Callable[[Sequence[str]], tuple[str, str]]
"""Takes the words after it; gives what is to be written and where: a file, or "-"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut:
    """A flag that sets one key of the configuration; without `metavar` it sets it to true.

    `replica_path` is its key with role replica, if that is another.
    """

    flag: str
    path: str
    help: str
    metavar: str = ""
    replica_path: str = ""


SHORTCUTS: Final = (
    Shortcut(
        flag="--join", metavar="FILE|-", path="link.join", help="join file, - for standard input"
    ),
    Shortcut(
        flag="--proxy", metavar="HOST:PORT", path="link.proxy", help="dial this proxy instead"
    ),
    Shortcut(
        flag="--listen", metavar="HOST:PORT", path="proxy.listen", help="where a proxy listens"
    ),
    Shortcut(
        flag="--state-dir",
        metavar="DIR",
        path="agent.state_dir",
        help="keys, staged adapters, caches, logs",
    ),
    Shortcut(flag="--log-dir", metavar="DIR", path="agent.log_dir", help="logs of vLLM and TRL"),
    Shortcut(flag="--run", metavar="NAME", path="run.name", help="name of the run"),
    Shortcut(flag="--name", metavar="NAME", path="replica.name", help="name of this replica"),
    Shortcut(flag="--model", metavar="DIR", path="model.path", help="folder of the base model"),
    Shortcut(
        flag="--model-id",
        metavar="OWNER/NAME",
        path="model.id",
        help="the base model on a hub, instead",
    ),
    Shortcut(
        flag="--model-revision",
        metavar="REV",
        path="model.revision",
        help="its branch, tag or commit",
    ),
    Shortcut(flag="--bucket", metavar="DIR", path="bucket.path", help="mounted bucket or folder"),
    Shortcut(
        flag="--bucket-url",
        metavar="URL",
        path="bucket.url",
        help="s3://BUCKET/PREFIX/, which the agent mounts itself",
    ),
    Shortcut(
        flag="--bucket-source",
        metavar="bucket|link",
        path="bucket.source",
        help="link: a replica without a bucket",
    ),
    Shortcut(
        flag="--engine-python",
        metavar="FILE",
        path="engine.python",
        help="Python that has vLLM or TRL",
    ),
    Shortcut(flag="--gpus", metavar="LIST", path="replica.gpus", help="GPUs of a replica, as 0,1"),
    Shortcut(
        flag="--replicas",
        metavar="N|auto",
        path="local.replicas",
        replica_path="replica.replicas",
        help="replicas of a local fleet, or of this host; auto: as its GPUs allow",
    ),
    Shortcut(
        flag="--min-replicas",
        metavar="N",
        path="trainer.min_replicas",
        help="replicas that training waits for",
    ),
    Shortcut(
        flag="--script",
        metavar="FILE",
        path="train.script",
        help="train with your own program that builds an AsyncGRPOTrainer",
    ),
    Shortcut(
        flag="--init-from",
        metavar="RUN[@VERSION]",
        path="train.init_from",
        help="begin a new run with an earlier run's adapter",
    ),
    Shortcut(
        flag="--embed-proxy",
        path="trainer.embed_proxy",
        help="a trainer with the proxy in its own process",
    ),
    Shortcut(
        flag="--log-level",
        metavar="LEVEL",
        path="agent.log_level",
        help="debug, info, warning or error",
    ),
    Shortcut(flag="--log-json", path="agent.log_json", help="log JSON objects"),
)


class Parser(argparse.ArgumentParser):
    """Of one width on every terminal; mistakes are UsageErrors."""

    def __init__(self, command: str, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"{PROGRAM} {command}".rstrip(),
            usage=f"{PROGRAM} {usage}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=32, width=98
            ),
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"Try `{self.prog} --help`")


def act(
    command: str, description: str, actions: Mapping[str, Action], words: Sequence[str]
) -> tuple[str, str]:
    """Do what the first of `words` names."""
    action = actions.get(words[0]) if words else None
    if action is not None:
        return action(words[1:])
    parser = Parser(command, f"{command} {'|'.join(actions)} ...", description)
    parser.add_argument("action", choices=list(actions))
    parser.parse_args(list(words))
    raise UsageError("the action comes first", fix=f"Try `{parser.prog} --help`")


def add_config_flags(parser: Parser, *, only: Collection[str] | None = None) -> None:
    """All flags of an agent; with `only` these of the shortcuts, for a command without a role."""
    if only is None:
        parser.add_argument("--role", metavar="ROLE", help=", ".join(ROLES))
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML)")
    for shortcut in SHORTCUTS:
        if only is not None and shortcut.flag not in only:
            continue
        shape: dict[str, Any] = (
            {"metavar": shortcut.metavar}
            if shortcut.metavar
            else {"action": "store_const", "const": "true"}
        )
        parser.add_argument(shortcut.flag, dest=shortcut.path, help=shortcut.help, **shape)
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set any key; VALUE is TOML, a bare word is a text; repeatable",
    )


def settings_of(options: argparse.Namespace) -> list[Setting]:
    settings = []
    for text in options.set:
        path, equals, value = text.partition("=")
        if not equals or "." not in path:
            raise UsageError(f"--set {path}: expected SECTION.KEY=VALUE")
        settings.append(Setting(path=path.strip(), value=value, origin="--set"))
    role = getattr(options, "role", None) or os.environ.get(ROLE_VARIABLE)
    for shortcut in SHORTCUTS:
        value = getattr(options, shortcut.path, None)
        if value is not None:
            path = shortcut.replica_path if role == "replica" else ""
            setting = Setting(path=path or shortcut.path, value=value, origin=shortcut.flag)
            settings.append(setting)
    return settings
