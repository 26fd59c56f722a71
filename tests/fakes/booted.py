"""This machine's own system booted once more, by its systemd, in namespaces of its own.

What is changed there is written over this machine's files and is gone at the end. There are no
other hosts, no network but loopback, and no services but those that a test starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess  # noqa: TID251 - a system is booted, and entered
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

SYSTEMD: Final = "/lib/systemd/systemd"
NEEDED: Final = ("unshare", "nsenter", "ip", "pivot_root", "systemctl")
PATIENCE_S: Final = 60.0
# Run where only this script sees its mounts, as the first process of its own tree. The kernel is
# this machine's, and so are its settings: they can be read, and no service applies others.
BOOT: Final = f"""
mount --make-rprivate /
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom tty fuse; do
  cp -a /dev/$name dev/ && chmod 666 dev/$name
done
ln -s /proc/self/fd dev/fd
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
ip link set lo up
pivot_root . mnt
umount -l /mnt
mount --make-rshared /
exec env -i container=test PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  {SYSTEMD} --unit=basic.target --log-target=journal --show-status=no
"""


@dataclass
class Booted:
    """One system. `folder` is its root, as this machine sees it."""

    folder: Path
    pid: int
    """Of its systemd, here."""

    def run(self, *words: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.pid}", "--all", "/usr/bin/env", "-i"]
        enter += ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"]
        return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=timeout_s)

    def sh(self, script: str) -> str:
        """What `script` prints; it must succeed."""
        done = self.run("sh", "-euc", script)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, unit: str, key: str) -> str:
        """A property of `unit`, as systemd says it."""
        return self.sh(f"systemctl show --property={key} --value '{unit}'")

    def journal(self, unit: str) -> str:
        done = self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")
        return done.stdout

    def start(self, unit: str) -> None:
        """Until it is active, which for Type=notify is when it has said so."""
        done = self.run("systemctl", "start", unit)
        assert done.returncode == 0, done.stderr + self.journal(unit)

    def wait_for(self, unit: str, key: str, value: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.show(unit, key)) != value:
            assert time.monotonic() < deadline, f"{key}={found}\n{self.journal(unit)}"
            time.sleep(0.1)  # noqa: TID251 - systemd has no virtual clock

    def wait_for_journal(self, unit: str, text: str, times: int) -> None:
        """Until `unit` has said `text` so often."""
        deadline = time.monotonic() + PATIENCE_S
        while (said := self.journal(unit)).count(text) < times:
            assert time.monotonic() < deadline, said
            time.sleep(0.1)  # noqa: TID251 - systemd has no virtual clock


@contextmanager
def booted(folder: Path) -> Iterator[Booted]:
    """Boot in `folder`; skips where that cannot be done."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or not Path(SYSTEMD).exists():
        pytest.skip(f"needs root, systemd and {', '.join(missing or NEEDED)}")
    (folder / "memory").mkdir()
    (folder / "root").mkdir()
    # What is written goes to memory: a container's own files may be of a kind that cannot take it.
    run("mount", "-t", "tmpfs", "tmpfs", str(folder / "memory"))
    for name in ("upper", "work"):
        (folder / "memory" / name).mkdir()
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={folder}/memory/upper,workdir={folder}/memory/work"
    process: subprocess.Popen[bytes] | None = None
    group = Path(cgroup()) / f"asyncgrpo-{os.getpid()}"
    try:
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        shutil.rmtree(root / "etc/systemd/system")
        (root / "etc/systemd/system").mkdir()
        group.mkdir()
        own = ["--mount", "--pid", "--uts", "--ipc", "--cgroup", "--net", "--fork", "--kill-child"]
        script = f"echo $$ >{group}/cgroup.procs; exec unshare {' '.join(own)} sh -euc '{BOOT}'"
        with (folder / "systemd.log").open("wb") as log:
            process = subprocess.Popen(["sh", "-euc", script], cwd=root, stdout=log, stderr=log)
        system = Booted(root, first_process(process.pid))
        wait_until_up(system, folder / "systemd.log")
        yield system
    finally:
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for point in (root, folder / "memory"):
            subprocess.run(["umount", "--lazy", str(point)], capture_output=True)
        end_group(group)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")


def cgroup() -> str:
    """Where cgroups of version 2 are mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return line.split()[4]
    pytest.skip("no cgroup2 here")


def first_process(unshare: int) -> int:
    children = Path(f"/proc/{unshare}/task/{unshare}/children")
    deadline = time.monotonic() + PATIENCE_S
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # noqa: TID251 - the kernel has no virtual clock
    return int(found[0])


def wait_until_up(system: Booted, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while system.run("systemctl", "is-active", "basic.target").stdout.strip() != "active":
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)  # noqa: TID251 - systemd has no virtual clock


def end_group(group: Path) -> None:
    """Its folders, from the innermost; the processes have been killed with their first one."""
    deadline = time.monotonic() + PATIENCE_S
    while group.exists():
        folders = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        try:
            for folder in (*folders, group):
                folder.rmdir()
        except OSError:  # the kernel is still ending them
            assert time.monotonic() < deadline
            time.sleep(0.1)  # noqa: TID251 - the kernel has no virtual clock
