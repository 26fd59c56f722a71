"""Stands in for mount-s3: its documented flags, its messages, and the strict file system.

`installed` makes an executable that mounts "buckets", which are folders below one root. It takes
the flags that the given version has and no others, insists on those that the agent must give, and
fails as Mountpoint does: no such bucket, no credentials or wrong ones, or nobody there while a file
`down` lies in the root. Its runs, with arguments and environment, are told in `runs.jsonl`.

Written from Mountpoint's documentation, v1.24.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

TESTS = Path(__file__).parent.parent
ACCESS_KEY, SECRET_KEY = "AKIDFAKE0000FAKE0000", "fakeSecretFakeSecretFakeSecretFakeSecret"
Version = tuple[int, int, int]

_FLAGS = (
    "--read-only",
    "--allow-delete",
    "--allow-overwrite",
    "--force-path-style",
    "--foreground",
)
_FLAGS_SELDOM = ("--allow-other", "--allow-root", "--auto-unmount", "--no-sign-request", "--debug")
_OPTIONS: Mapping[str, Version] = {
    "--prefix": (1, 0, 0),
    "--region": (1, 0, 0),
    "--endpoint-url": (1, 0, 0),
    "--profile": (1, 0, 0),
    "--cache": (1, 0, 0),
    "--metadata-ttl": (1, 7, 0),
    "--upload-checksums": (1, 7, 0),
    "--negative-metadata-ttl": (1, 15, 0),
    "--ca-bundle": (1, 23, 0),
    "--memory-target": (1, 24, 0),
}


class Installed:
    """An installed mount-s3 and the store that it reaches."""

    def __init__(self, folder: Path, version: str = "1.24.0") -> None:
        self.root = folder / "s3"
        self.root.mkdir(exist_ok=True)
        self.program = folder / "mount-s3"
        self.program.write_text(
            "#!/bin/sh\n"
            f"export PYTHONPATH={TESTS} FUSE_LIBRARY_NAME=fuse3\n"
            f'exec {sys.executable} -P -m fakes.mount_s3 {self.root} {version} "$@"\n'
        )
        self.program.chmod(0o755)
        self.credentials = folder / "credentials"
        self.write_credentials(SECRET_KEY)

    def write_credentials(self, secret: str) -> None:
        self.credentials.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n"
        )
        self.credentials.chmod(0o600)

    def make_bucket(self, name: str) -> None:
        (self.root / name).mkdir()

    def runs(self) -> list[dict[str, Any]]:
        """Every start but those that only ask for the version."""
        file = self.root / "runs.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def daemons(self, mount_point: Path) -> list[int]:
        """The processes that serve `mount_point` now."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "fakes.mount_s3" in words and str(mount_point) in words:
                found.append(int(entry.name))
        return found

    def kill(self, mount_point: Path) -> None:
        (pid,) = self.daemons(mount_point)
        os.kill(pid, signal.SIGKILL)


def installed(folder: Path, version: str = "1.24.0") -> Installed:
    """Skips the test where nothing can be mounted, but never in CI."""
    if not Path("/dev/fuse").exists():
        if "CI" in os.environ:
            pytest.fail("CI must have /dev/fuse: this is what stands for Mountpoint")
        pytest.skip("no /dev/fuse here: nothing can be mounted")
    return Installed(folder.resolve(), version)


# --- the program -----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}\n\nFor more information, try '--help'.\n")
        raise SystemExit(2)


def _parser(version: Version) -> _Parser:
    parser = _Parser(prog="mount-s3", allow_abbrev=False, add_help=False)
    parser.add_argument("bucket")
    parser.add_argument("directory", type=Path)
    for flag in _FLAGS:
        parser.add_argument(flag, action="store_true")
    for option, since in _OPTIONS.items():
        if version >= since:
            parser.add_argument(option, default="")
    return parser


def main() -> None:
    root, version_text, *words = sys.argv[1:]
    if words == ["--version"]:
        print(f"mount-s3 {version_text}")  # noqa: T201 - as the real one does
        return
    major, minor, patch = map(int, version_text.split("."))
    options, unknown = _parser((major, minor, patch)).parse_known_args(words)
    if unknown:
        _fail(2, f"error: unexpected argument '{unknown[0].partition('=')[0]}' found")
    _note_run(Path(root), words)
    _check_agreed(options)
    _check_mount_point(options.directory)
    _check_store(Path(root), options)
    _mount(Path(root), options)


def _note_run(root: Path, words: list[str]) -> None:
    with (root / "runs.jsonl").open("a") as file:
        file.write(json.dumps({"argv": words, "env": dict(os.environ)}) + "\n")


def _check_agreed(options: argparse.Namespace) -> None:
    """What the real one takes, but the agent must never ask for."""
    if options.cache or options.allow_overwrite or options.metadata_ttl != "minimal":
        _fail(2, "error: unexpected argument: caches and overwriting are against the agent's rules")
    if not options.foreground:
        _fail(2, "error: unexpected argument: the daemon would leave its guard")
    if options.read_only and options.negative_metadata_ttl != "minimal":
        _fail(2, "error: unexpected argument: a replica must not remember what is missing")
    if options.prefix and not options.prefix.endswith("/"):
        _fail(2, "error: invalid value for '--prefix <PREFIX>': prefix must end in '/'")


def _check_mount_point(path: Path) -> None:
    what = ""
    if not os.path.exists(path):  # also so when a dead mount is there
        what = "does not exist"
    elif any(line.split()[4] == str(path) for line in open("/proc/self/mountinfo")):  # noqa: SIM115
        what = "is already mounted"
    if what:
        _fail(1, "Error: Failed to create mount point", f"mount point {path} {what}")


def _check_store(root: Path, options: argparse.Namespace) -> None:
    listing = f"initial ListObjectsV2 failed for bucket {options.bucket} in region us-east-1"
    head = "Error: Failed to create S3 client"
    if (root / "down").exists():
        crt = "CRT error 1048: aws-c-io: AWS_IO_SOCKET_TIMEOUT, socket operation timed out."
        _fail(1, head, listing, "Client error", "Unknown CRT error", crt)
    keys = _keys(options.profile or "default")
    if keys is None:
        what = "No signing credentials available, see CRT debug logs"
        _fail(1, head, listing, "Client error", what)
    if keys != (ACCESS_KEY, SECRET_KEY):
        sys.stderr.write(f"DEBUG signing with aws_secret_access_key={keys[1]}\n")
        _fail(1, head, listing, "Client error", "Forbidden: Access Denied")
    if not (root / options.bucket).is_dir():
        _fail(1, head, listing, "Service error", "The bucket does not exist")


def _keys(profile: str) -> tuple[str, str] | None:
    """By the environment before the file, as in the chain of the AWS SDKs."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return os.environ["AWS_ACCESS_KEY_ID"], os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    parser = configparser.RawConfigParser()
    parser.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "/nowhere"))
    if not parser.has_section(profile):
        return None
    return parser[profile]["aws_access_key_id"], parser[profile]["aws_secret_access_key"]


def _fail(code: int, head: str, *causes: str) -> NoReturn:
    lines = [head, *(["", "Caused by:"] if causes else [])]
    lines += [f"    {number}: {cause}" for number, cause in enumerate(causes)]
    sys.stderr.write("\n".join(lines) + "\n")
    raise SystemExit(code)


def _mount(root: Path, options: argparse.Namespace) -> None:
    from fakes.strict_mount_control import Control, Options
    from fakes.strict_mount_fs import serve  # loads libfuse

    strict = Options(
        bucket=str(root / options.bucket / options.prefix),
        path=str(options.directory),
        read_only=options.read_only,
        allow_delete=options.allow_delete,
    )
    serve(strict, Control({}))


if __name__ == "__main__":
    main()
