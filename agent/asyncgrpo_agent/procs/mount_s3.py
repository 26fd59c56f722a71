"""mount-s3 as a child: asking for its version, its environment, and undoing a mount.

Written from Mountpoint's documentation v1.24; tested against a stand-in. What to run is decided in
`core.mountpoint`; when, in `roles.bucket_mount`. The daemon gets the keys of the bucket and nobody
else does. Nothing here looks at the mount itself.
"""

from __future__ import annotations

import configparser
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from asyncgrpo_agent.core.mountpoint import (
    KEY_VARIABLES,
    MountCommand,
    MountSpec,
    Version,
    parse_version,
)
from asyncgrpo_agent.errors import ChildError, ConfigError
from asyncgrpo_agent.procs import child

VERSION_S: Final = 20.0
UNMOUNT_S: Final = 5.0
_SECRET_KEYS: Final = ("aws_secret_access_key", "aws_session_token", "aws_access_key_id")


async def installed_version(program: str) -> Version:
    """What `program --version` says. Raises ConfigError if it is nothing to work with."""
    try:
        code, said = await child.output_of(
            "mount-s3", [program, "--version"], env=child.inherited({}, "tool"), timeout_s=VERSION_S
        )
    except ChildError as error:
        raise ConfigError(error.what, where="bucket.mount_s3", fix=error.fix) from error
    if code:
        what = f"{program} --version ended with exit code {code}: {said[-300:]}"
        fix = "Its package needs fuse (or libfuse2), and glibc 2.17"
        raise ConfigError(what, where="bucket.mount_s3", fix=fix)
    return parse_version(said, program)


def environment(command: MountCommand) -> dict[str, str]:
    """The whole environment of the daemon."""
    inherited = child.inherited({}, "mount")
    kept = {name: value for name, value in inherited.items() if name not in command.removals}
    return kept | command.additions


def secrets(spec: MountSpec, env: Mapping[str, str]) -> list[str]:
    """What must never be shown of what the daemon gets."""
    found = [env[name] for name in KEY_VARIABLES if env.get(name)]
    return found + list(_secrets_of(spec.credentials_file) if spec.credentials_file else ())


def _secrets_of(file: str) -> Iterator[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return  # mount-s3 says what is wrong with it
    for section in parser.sections():
        yield from (value for key, value in parser.items(section) if key in _SECRET_KEYS and value)


async def unmount(mount_point: str, *, lazily: bool) -> str:
    """Try every tool until one succeeds; "" then, else what they said."""
    said = []
    for argv in _unmount_commands(mount_point, lazily=lazily):
        try:
            code, text = await child.output_of(
                "unmount", argv, env=child.inherited({}, "tool"), timeout_s=UNMOUNT_S
            )
        except ChildError as error:
            said.append(str(error))
            continue
        if code == 0:
            return ""
        said.append(text or f"{argv[0]} ended with exit code {code}")
    return "; ".join(said) or "neither fusermount3 nor umount is installed"


def _unmount_commands(mount_point: str, *, lazily: bool) -> Iterator[list[str]]:
    for name in ("fusermount3", "fusermount"):
        if shutil.which(name):
            yield [name, "-uz" if lazily else "-u", mount_point]
            break
    if os.geteuid() == 0 and shutil.which("umount"):  # mounts of root's need no fusermount
        yield ["umount", *(["-l"] if lazily else []), mount_point]
