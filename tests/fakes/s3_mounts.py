"""Real mounts of a real S3 bucket: rclone's and s3fs's, as users of those have them.

    with s3_mounts.mounted("s3fs", store.address, tmp_path / "replica", read_only=True) as mount:
        os.listdir(mount.path)

With the options that make them fit for a bucket that others write to: a listing is believed for no
more than a second, that a file is missing not at all, and an outage is an error within a minute.
What s3fs knows of a file that exists it may keep: names are written once, and without that memory
each listing asks S3 for every file in it. Always unmounted in the end.
"""

from __future__ import annotations

import subprocess  # noqa: TID251 - mounts of others
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, get_args

import pytest

from asyncgrpo_agent.store.mounts import mounted_at
from fakes.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, missing, program

Kind = Literal["rclone", "s3fs"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# In the mount table: type and source.
IN_TABLE: Final = {"rclone": f"fuse.rclone store:{BUCKET}", "s3fs": "fuse.s3fs s3fs"}
_MOUNTED_S: Final = 15.0
_ENDED_S: Final = 5.0


class S3Mount:
    """One mount, one daemon; `kill` and `remount` as an operator and his bad luck would."""

    def __init__(self, kind: Kind, endpoint: str, path: Path, *, read_only: bool) -> None:
        self.kind = kind
        self.path = path
        self._files = path.with_name(f"{path.name}.files")
        self._files.mkdir()
        self._log = self._files / "log"
        commands = {"rclone": self._rclone, "s3fs": self._s3fs}
        self._command = commands[kind](f"http://{endpoint}", read_only)
        self._process = self._start()

    def kill(self) -> None:
        """The daemon dies: ENOTCONN, and the mount table does not show it."""
        self._process.kill()
        self._process.wait()

    def remount(self) -> None:
        self.stop()
        self._process = self._start()

    def stop(self) -> None:
        """Ends in any case, whoever still holds a file open."""
        for flag in ("-u", "-uz"):
            if mounted_at(self.path) is not None:
                subprocess.run(
                    ["fusermount3", flag, str(self.path)],
                    capture_output=True,
                    check=False,
                    timeout=_ENDED_S,
                )
        try:
            self._process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + _MOUNTED_S
        while mounted_at(self.path) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                pytest.fail(f"{self.kind} does not mount:\n{self._log.read_text()}")
            time.sleep(0.01)  # noqa: TID251 - the mount table tells nobody
        return process

    # --- their options ----------------------------------------------------------------------

    def _rclone(self, url: str, read_only: bool) -> list[str]:
        config = self._files / "rclone.conf"
        config.write_text(
            "[store]\ntype = s3\nprovider = SeaweedFS\nregion = us-east-1\n"
            f"force_path_style = true\nendpoint = {url}\n"
            f"access_key_id = {ACCESS_KEY}\nsecret_access_key = {SECRET_KEY}\n"
        )
        return [
            *(program("rclone"), "mount", f"store:{BUCKET}", str(self.path)),
            *(f"--config={config}", f"--cache-dir={self._files}"),
            *("--dir-cache-time=1s", "--attr-timeout=100ms", "--poll-interval=0"),
            *("--contimeout=2s", "--timeout=3s", "--low-level-retries=2"),
            *(["--read-only"] if read_only else []),
        ]

    def _s3fs(self, url: str, read_only: bool) -> list[str]:
        keys = self._files / "passwd"
        keys.write_text(f"{ACCESS_KEY}:{SECRET_KEY}\n")
        keys.chmod(0o600)
        options = [f"passwd_file={keys}", f"url={url}", "use_path_request_style"]
        options += [*_without_negative_cache(), "connect_timeout=2"]
        options += ["readwrite_timeout=3", "retries=1"]
        options += ["ro"] if read_only else []
        return [program("s3fs"), BUCKET, str(self.path), "-f", "-o", ",".join(options)]


def _without_negative_cache() -> list[str]:
    """It is on by default after 1.90, which does not know the option."""
    told = subprocess.run([program("s3fs"), "--help"], capture_output=True, check=False).stdout
    known = ("disable_noobj_cache", "disable_negative_cache")
    return [option for option in known if option.encode() in told][:1]


@contextmanager
def mounted(kind: Kind, endpoint: str, path: Path, *, read_only: bool = False) -> Iterator[S3Mount]:
    """Mount the bucket at `path`, a folder that is made for it."""
    if not Path("/dev/fuse").exists():
        missing("/dev/fuse")
    path = path.resolve()
    path.mkdir(parents=True)
    mount = S3Mount(kind, endpoint, path, read_only=read_only)
    try:
        yield mount
    finally:
        mount.stop()
        path.rmdir()
