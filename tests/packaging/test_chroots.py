"""The archive in fresh Debian roots without Python, compiler or network, as it lies in dist/."""

from __future__ import annotations

import os
import shutil
import subprocess  # noqa: TID251 - roots are made and entered
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.frozen import DIST

pytestmark = pytest.mark.deep

DEMO = Path(__file__).parents[2] / "scripts" / "demo_task"
MOUNTS = ("proc", "sys", "dev", "dev/shm")
WITHIN = ["/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
# No way out of the root's own network but loopback, which needs no tool to be switched on.
LONELY = ["unshare", "--net", "--fork", "--kill-child"]
LOOPBACK = "ip link set lo up && exec chroot"


class Root:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        enter = [*LONELY, "sh", "-c", f'{LOOPBACK} "$@"', "sh", str(self.folder), *WITHIN]
        return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=timeout_s)

    def install(self, archive: Path) -> None:
        shutil.copy(archive, self.folder / "archive.tar.gz")
        done = self.run("sh", "-euc", "cd /root; tar -xzf /archive.tar.gz; */install.sh")
        assert done.returncode == 0, done.stderr
        (self.folder / "archive.tar.gz").unlink()


@pytest.fixture(params=["bookworm", "bullseye"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    needed = ("debootstrap", "unshare", "ip", "chroot")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing or needed)}")
    folder = tmp_path / "root"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", request.param, str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.decode()[-300:]}")
    mounted = []
    try:
        for name in MOUNTS:
            point = folder / name
            point.mkdir(exist_ok=True)
            how = ["-t", name, name] if name in ("proc", "sysfs") else ["--bind", f"/{name}"]
            subprocess.run(["mount", *how, str(point)], check=True)
            mounted.append(point)
        yield Root(folder)
    finally:
        for point in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(point)], check=True)


def archive_of(kind: str) -> Path:
    found = sorted(DIST.glob(f"asyncgrpo-agent-*-linux-x86_64{kind}.tar.gz"))
    if not found:
        pytest.skip(f"no such archive in dist/: scripts/package --engine {kind[1:] or 'none'}")
    return found[-1]


def test_the_agent_runs_on_a_bare_host(root: Root) -> None:
    root.install(archive_of(""))
    assert root.run("sh", "-c", "command -v python3 gcc").returncode != 0
    assert root.run("id", "asyncgrpo").returncode == 0
    done = root.run("asyncgrpo-agent", "--version")
    if "GLIBC" in done.stderr:
        pytest.skip("the archive was built for newer hosts: scripts/package --target debian11")
    assert done.returncode == 0, done.stderr
    proxy = "asyncgrpo-agent --role proxy --listen 127.0.0.1:7843"
    assert root.run("sh", "-c", f"timeout 3 {proxy}; test $? = 124 -o $? = 0").returncode == 0
    doctor = root.run("asyncgrpo-agent", "doctor", "--role", "replica")
    assert "engine" in doctor.stdout or "link.join" in doctor.stdout


def test_the_demo_runs_from_the_archive(root: Root) -> None:
    if (root.folder / "etc/debian_version").read_text().startswith("11"):
        pytest.skip("wheels of vLLM and torch are for newer systems than Debian 11")
    root.install(archive_of("-cpu"))
    shutil.copytree(DEMO, root.folder / "demo")
    flags = ["--config", "/demo/demo.toml", "--state-dir", "/root/state"]
    steps = ["--set", "train.max_steps=10", "--set", "train.eval.samples=20"]
    done = root.run("asyncgrpo-agent", "--role", "local", *flags, *steps, timeout_s=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (root.folder / "root/state/trainer").is_dir()
