"""Fresh Debian systems without Python, compiler or network, to be entered by chroot."""

from __future__ import annotations

import os
import shutil
import subprocess  # noqa: TID251 - roots are made and entered
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from fakes.adapters import safetensors
from fakes.frozen import DIST

SOURCES: Final = Path(__file__).parents[2]
MOUNTS: Final = ("proc", "sys", "dev", "dev/shm")
WITHIN: Final = [
    *("/usr/bin/env", "-i", "HOME=/root"),
    "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
]
# A network of its own with loopback alone, which is switched on from outside: within is no tool.
LONELY: Final = ["unshare", "--net", "--fork", "--kill-child"]
LOOPBACK: Final = 'ip link set lo up && exec chroot "$@"'


class Root:
    """One system. What runs in it sees this machine's processes and devices, and no network."""

    def __init__(self, folder: Path, release: str) -> None:
        self.folder = folder
        self.release = release

    def run(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        enter = [*LONELY, "sh", "-c", LOOPBACK, "sh", str(self.folder), *WITHIN]
        return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=timeout_s)

    def sh(self, script: str, *, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return self.run("sh", "-euc", script, timeout_s=timeout_s)

    def unpack(self, archive: Path) -> str:
        """The unpacked folder, as it is called within."""
        parent = self.folder / "root/unpacked"
        shutil.rmtree(parent, ignore_errors=True)
        parent.mkdir()
        subprocess.run(["tar", "-xzf", str(archive), "-C", str(parent)], check=True)
        (folder,) = parent.iterdir()
        return f"/root/unpacked/{folder.name}"

    def add_engine(self) -> str:
        """The engine's stand-ins, run by the Python that the agent for Debian 11 is made with."""
        prefix = DIST / "debian11/root/opt/python"
        packages = DIST / "debian11/root/dist/build-env/lib/python3.11/site-packages"
        if not (prefix / "bin/python3.11").exists() or not packages.exists():
            pytest.skip("needs the Python of `scripts/build --target debian11`")
        at = self.folder / "opt/python"  # the one path that it works at
        for source, target in ((prefix, at), (packages, self.folder / "srv/packages")):
            shutil.copytree(source, target, symlinks=True)
        for name in ("agent", "tests"):
            shutil.copytree(SOURCES / name, self.folder / "srv" / name)
        model = self.folder / "srv/tiny"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "qwen2"}')
        weights = safetensors({"w": ([4, 4], bytes(range(64)))})
        (model / "model.safetensors").write_bytes(weights)
        (self.folder / "srv/data.jsonl").write_text('{"prompt": "1+1="}\n')
        program = self.folder / "srv/fake-python"
        program.write_text(
            "#!/bin/sh\n"
            'case "$2" in asyncgrpo_engine.train) shift 2; set -- -m fakes.trl "$@" ;; esac\n'
            "export PYTHONPATH=/srv/agent:/srv/tests:/srv/packages\n"
            'exec /opt/python/bin/python3.11 -P -B "$@"\n'
        )
        program.chmod(0o755)
        return "/srv/fake-python"


@contextmanager
def debian_root(folder: Path, release: str) -> Iterator[Root]:
    """A minimal system of that release, made by debootstrap from Debian's mirror."""
    needed = ("debootstrap", "unshare", "ip", "chroot")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing or needed)}")
    command = ["debootstrap", "--variant=minbase", release, str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-1000:] + made.stderr[-1000:]
    mounted = []
    try:
        for name in MOUNTS:
            point = folder / name
            point.mkdir(exist_ok=True)
            how = (
                ["-t", "proc", "proc"]
                if name == "proc"
                else ["--bind", "--make-private", f"/{name}"]
            )
            subprocess.run(["mount", *how, str(point)], check=True)
            mounted.append(point)
        yield Root(folder, release)
    finally:
        for point in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(point)], check=True)
        if not any(os.path.ismount(folder / name) for name in MOUNTS):
            shutil.rmtree(folder)  # gigabytes, with an engine
