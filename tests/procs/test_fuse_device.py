from __future__ import annotations

import os
import socket
import subprocess  # noqa: TID251 - a mount is undone as root would
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncgrpo_agent.procs import fuse_device

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path(fuse_device.DEVICE).exists(), reason="needs root and /dev/fuse"
)
INIT = 26  # the first that a kernel asks of a FUSE daemon


class Systemd:
    """The end of a notification socket that holds descriptors."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.messages: list[str] = []
        self.held: list[int] = []
        self._reader = threading.Thread(target=self._read)

    def _read(self) -> None:
        while "BARRIER=1" not in self.messages:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 4)
            self.messages.append(data.decode())
            self.held += descriptors
        os.close(self.held.pop())  # what came with the barrier: so far, all is done

    def __enter__(self) -> Systemd:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.join(10)
        self._socket.close()
        for descriptor in self.held:
            os.close(descriptor)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with Systemd(tmp_path) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    made = tmp_path / "bucket"
    made.mkdir()
    yield str(made)
    subprocess.run(["umount", "-f", "-l", str(made)], check=True)


def mounted(folder: str) -> list[str]:
    (line,) = (x for x in Path("/proc/self/mountinfo").read_text().splitlines() if folder in x)
    return line.split()


@pytest.mark.parametrize("options", [[], ["--prefix=a/", "--read-only"]])
def test_a_daemon_finds_the_device_of_a_mount_with_systemd(
    systemd: Systemd, folder: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    assert fuse_device.main(folder, options) == 0
    assert systemd.messages == [
        "FDSTOREREMOVE=1\nFDNAME=fuse",
        "FDSTORE=1\nFDNAME=fuse",
        "BARRIER=1",
    ]
    fields = mounted(folder)
    assert fields[fields.index("-") + 1 :][:2] == ["fuse", "mountpoint-s3"]
    flags = fields[5].split(",")
    assert {"nosuid", "nodev", "noatime"} <= set(flags)
    assert ("ro" in flags) == ("--read-only" in options)
    asked = os.read(systemd.held[0], 1 << 16)
    assert int.from_bytes(asked[4:8], "little") == INIT


def test_it_is_for_systemd_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert fuse_device.main(str(tmp_path), []) == 2
    assert "for systemd" in capsys.readouterr().err


def test_what_cannot_be_mounted_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    assert fuse_device.main(str(tmp_path / "missing"), []) == 1
    assert "missing cannot be mounted: No such file" in capsys.readouterr().err
