"""The command line: reads arguments, starts one role, turns errors into a line and an exit code.

`--help` must stay quick, so nothing that brings trio, cryptography or a role is imported before
the arguments are understood. Nothing here decides what a role does.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from asyncgrpo_agent.config import sources
from asyncgrpo_agent.config.sections import ROLES, Config
from asyncgrpo_agent.errors import EXIT_CONFIG, AgentError, StoreError, UsageError
from asyncgrpo_agent.flags import PROGRAM, Parser, add_config_flags, settings_of

EXIT_INTERRUPTED: Final = 130  # as shells report SIGINT
_DISK_FAULTS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_DESCRIPTION: Final = """\
Asynchronous GRPO with LoRA across machines that share no NCCL, no file system and no open port.

commands:
  (none)                start one role and stay in the foreground
  init                  write a commented configuration file
  check                 validate a configuration and show its effective values
  run create            make a run and its signing key
  run add               make a run known to a proxy that is not to have its private key
  run list              show the runs of this host and where their private keys are
  join add-key          complete a trainer's join line where the run's private key is
  token create          make a join line for a replica, a trainer or a viewer
  token list            show the tokens of all join lines
  token revoke          end one of them, and the links that are up on it
  status                show a run, or all of them; --watch; exits with 1 if one is not well
  logs                  show what happened in a run; --follow
  rollouts tail         show prompts and answers, if the trainer gives any; --follow
  drain                 have one replica of a running proxy finish and go
  adapters              show the versions of a run's adapter, who holds them and since when
  adapters get          take one home, as a folder that PEFT loads
  report                write a page about a run, with charts, from its history or its bucket
  plan                  simulate a fleet: sync time, idle share, S3 requests, dollars, proxies
  model pack            write a base model as a folder for hosts without a model hub
  model verify          check every byte of such a folder
  doctor                look at this host: what a role needs, what is there, how to mend it
  diag                  write one zip file about an agent of this host, for a report of a fault
  paths                 show where an agent keeps its files here
  version               show versions, with --all of everything within
"""
_EPILOG: Final = """\
Whatever follows -- is appended to the flags of vLLM. Every key of the configuration can also be
set as ASYNCGRPO_<SECTION>_<KEY>; flags override the environment, which overrides the file.
Exit codes: 0 fine, 1 failure, 2 usage, 78 configuration (a restart would not help).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; the result is the exit code of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except AgentError as error:
        return _report([error])
    except OSError as error:
        if not _is_expected(error):
            raise
        return _report([_disk_error(error)])
    except BaseExceptionGroup as group:  # a role's nurseries may wrap what they raise
        return _report_group(group)


def _dispatch(words: list[str]) -> int:
    engine_args: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, engine_args = words[:at], words[at + 1 :]
    command = _COMMANDS.get(words[0]) if words else None
    if command is None:
        return _start(words, engine_args)
    return command(words[1:], engine_args)


def _report(errors: Iterable[AgentError]) -> int:
    from asyncgrpo_agent.logs import without_secrets

    code = 0
    for error in errors:
        print(without_secrets(f"{PROGRAM}: error: {error}"), file=sys.stderr)
        code = EXIT_CONFIG if EXIT_CONFIG in (code, error.exit_code) else error.exit_code
    return code


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """A bug keeps its traceback; errors that a user can meet and Ctrl-C do not show one."""
    expected, bugs = group.split(_is_expected)
    if bugs is not None or expected is None:
        raise group
    leaves = list(_leaves(expected))
    errors = [error for error in leaves if isinstance(error, AgentError)]
    errors += [_disk_error(error) for error in leaves if isinstance(error, OSError)]
    return _report(errors) if errors else EXIT_INTERRUPTED


def _is_expected(error: BaseException) -> bool:
    is_full_disk = isinstance(error, OSError) and error.errno in _DISK_FAULTS
    return is_full_disk or isinstance(error, (AgentError, KeyboardInterrupt))


def _disk_error(error: OSError) -> AgentError:
    return StoreError(
        f"cannot be written: {error.strerror}",
        where=str(error.filename or "a local disk"),
        fix="Make room there, or choose another place (--state-dir, $TMPDIR)",
    )


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


# --- starting a role -------------------------------------------------------------------------


def _start(words: list[str], engine_args: list[str]) -> int:
    parser = Parser(
        "", "[--role ROLE] [flags] [-- ENGINE ARGS...] | COMMAND ...", _DESCRIPTION, _EPILOG
    )
    add_config_flags(parser)
    parser.add_argument(
        "--print-engine-command",
        action="store_true",
        help="show how a replica would start vLLM, and exit",
    )
    parser.add_argument("--version", action="store_true", help="show versions, and exit")
    options = parser.parse_args(words)
    if options.version:
        from asyncgrpo_agent import host_commands

        print(host_commands.version_line())
        return 0
    config = _load(options, engine_args)
    if options.print_engine_command:
        return _print_engine_command(config)
    from asyncgrpo_agent import logs
    from asyncgrpo_agent.config import host

    logs.set_up(as_json=config.agent.log_json, level=config.agent.log_level.upper())
    host.check_platform()
    role = "embedded" if config.role == "trainer" and config.has_proxy else config.role
    resolved = host.resolved(config, sys.stdin)
    _hide_join(resolved.join_line)
    _warn_of_host(resolved)
    from asyncgrpo_agent import dumps

    with dumps.on_signal(resolved.state_dir, role):
        return role_entry(role)(resolved)


def _hide_join(line: str) -> None:
    """Have no log repeat what the join line holds. What is wrong with it, its role says."""
    from asyncgrpo_agent import logs
    from asyncgrpo_agent.core.join import decode

    logs.hide(line)
    with contextlib.suppress(AgentError):
        join = decode(line)
        logs.hide(join.token, (join.run_private_key or b"").hex())


def _warn_of_host(config: Config) -> None:
    """Say what this host lacks before anything heavy starts; some engines do without it."""
    from asyncgrpo_agent import doctor
    from asyncgrpo_agent.logs import Log

    for row in doctor.local_rows(config):
        if row.fix:
            Log(__name__).warning(
                "host.lacks", what=row.what, found=row.found, needed=row.needed, fix=row.fix
            )


def _load(options: argparse.Namespace, engine_args: Sequence[str]) -> Config:
    from asyncgrpo_agent import logs
    from asyncgrpo_agent.procs.environment import secret_values

    logs.hide(*secret_values(os.environ))
    config = sources.load(
        role=options.role,
        file=options.config,
        settings=settings_of(options),
        engine_args=engine_args,
    )
    logs.hide(*secret_values(config.engine.env))
    return config


def role_entry(role: str) -> Callable[[Config], int]:
    """The `run` of one role's module."""
    # Plain import statements, because a frozen build follows only those.
    if role == "proxy":
        from asyncgrpo_agent.roles import proxy

        return proxy.run
    if role == "replica":
        from asyncgrpo_agent.roles import replicas

        return replicas.run
    if role == "trainer":
        from asyncgrpo_agent.roles import trainer

        return trainer.run
    if role == "embedded":
        from asyncgrpo_agent.roles import embedded

        return embedded.run
    from asyncgrpo_agent.roles import local

    return local.run


def _print_engine_command(config: Config) -> int:
    if config.role not in ("replica", "local"):
        raise UsageError("--print-engine-command is for role replica")
    from asyncgrpo_agent.config.host import with_engine_python
    from asyncgrpo_agent.roles import replica, replicas

    for one in replicas.replicas_of(with_engine_python(config).for_display()):
        print(replica.engine_command_line(one))
    return 0


# --- commands --------------------------------------------------------------------------------


def _init(words: list[str], _engine_args: list[str]) -> int:
    usage = "init --role ROLE [--output FILE] [--force]"
    parser = Parser("init", usage, "Write a commented configuration file for one role.")
    parser.add_argument("--role", metavar="ROLE", required=True, help=", ".join(ROLES))
    parser.add_argument(
        "--output", metavar="FILE", help="default: ROLE.toml; - for standard output"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    options = parser.parse_args(words)
    from asyncgrpo_agent.config.example import example

    role = sources.chosen_role(options.role)
    _write(example(role), options.output or f"{role}.toml", overwrite=options.force, mode=0o644)
    return 0


def _check(words: list[str], engine_args: list[str]) -> int:
    usage = "check [--role ROLE] [--config FILE] [flags] [-- ENGINE ARGS...]"
    description = "Validate a configuration and this host, and show the effective values."
    parser = Parser("check", usage, description)
    add_config_flags(parser)
    config = _load(parser.parse_args(words), engine_args)
    import tomli_w

    from asyncgrpo_agent.config.host import check_host
    from asyncgrpo_agent.logs import without_secrets

    print(without_secrets(tomli_w.dumps(config.redacted())))
    for path, origin in config.origins.items():
        print(f"# {path}: from {origin}")
    check_host(config)
    return 0


def _run(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import run_commands

    return _written(*run_commands.run(words))


def _join(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import run_commands

    return _written(*run_commands.join(words))


def _token(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import token_commands

    return _written(*token_commands.run(words))


def _drain(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import drain_command

    drain_command.run(words)
    return 0


def _adapters(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import adapter_commands

    return _written(*adapter_commands.run(words))


def _status(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import viewer_commands

    return viewer_commands.status(words)


def _logs(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import viewer_commands

    return viewer_commands.logs(words)


def _rollouts(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import viewer_commands

    return viewer_commands.rollouts(words)


def _report_run(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import report_command

    report_command.run(words)
    return 0


def _plan(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import plan_command

    sys.stdout.write(plan_command.run(words))
    return 0


def _model(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import model_commands

    return _written(*model_commands.run(words))


def _doctor(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import host_commands

    text, code = host_commands.doctor(words)
    sys.stdout.write(text)
    return code


def _diag(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import diag_command

    return diag_command.run(words)


def _paths(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import host_commands

    sys.stdout.write(host_commands.paths(words))
    return 0


def _version(words: list[str], _engine_args: list[str]) -> int:
    from asyncgrpo_agent import host_commands

    sys.stdout.write(host_commands.version(words))
    return 0


def _written(text: str, output: str) -> int:
    """Write what may be a secret."""
    if text:
        _write(text, output, overwrite=False, mode=0o600)
    return 0


def _write(text: str, output: str, *, overwrite: bool, mode: int) -> None:
    if output == "-":
        sys.stdout.write(text)
        return
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if overwrite else os.O_EXCL)
    try:
        with os.fdopen(os.open(output, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            "the file exists already", where=output, fix="Remove it or choose another name"
        ) from error
    except OSError as error:
        raise AgentError(f"cannot be written: {error.strerror}", where=output) from error
    print(f"wrote {output}", file=sys.stderr)


_COMMANDS: Final[dict[str, Callable[[list[str], list[str]], int]]] = {
    "init": _init,
    "check": _check,
    "run": _run,
    "join": _join,
    "token": _token,
    "drain": _drain,
    "adapters": _adapters,
    "status": _status,
    "logs": _logs,
    "rollouts": _rollouts,
    "report": _report_run,
    "plan": _plan,
    "model": _model,
    "doctor": _doctor,
    "diag": _diag,
    "paths": _paths,
    "version": _version,
}
