"""The archive and its install.sh, in a root of their own, with a stand-in for the frozen agent."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess  # noqa: TID251 - scripts are run as a user runs them
import sys
import tarfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ROOT = Path(__file__).parents[2]
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def packed(folder: Path, version: str) -> Path:
    """The archive of `version`, whose agent prints that version."""
    dist = folder / f"dist-{version}"
    internal = dist / "onedir" / "_internal"
    internal.mkdir(parents=True, exist_ok=True)
    program = dist / "onedir" / "asyncgrpo-agent"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    (internal / "empty").touch()
    key = folder / "key.pem"
    key.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    argv = [sys.executable, str(ROOT / "build" / "package.py"), f"--dist={dist}", f"--key={key}"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    words = [f"--agent={dist / 'onedir'}", f"--version={version}", "--engine=none"]
    subprocess.run([*argv, *words], env=env, check=True, capture_output=True)
    return dist / f"asyncgrpo-agent-{version}-linux-x86_64.tar.gz"


class Host:
    """An empty root, and the folders that archives were unpacked to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.root.mkdir()

    def unpack(self, version: str) -> Path:
        with tarfile.open(packed(self.folder, version)) as archive:
            archive.extractall(self.folder / "unpacked", filter="data")
        return self.folder / "unpacked" / f"asyncgrpo-agent-{version}"

    def run(self, unpacked: Path, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(unpacked / "install.sh"), *words, "--root", str(self.root)]
        return subprocess.run(argv, capture_output=True, text=True)

    def version(self) -> str:
        program = self.root / "opt/asyncgrpo-agent/current/agent/asyncgrpo-agent"
        return subprocess.run([str(program)], capture_output=True, text=True).stdout.strip()

    def files(self) -> dict[str, str]:
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            found[name] = os.readlink(path) if path.is_symlink() else "" if path.is_dir() else (
                hashlib.sha256(path.read_bytes()).hexdigest()
            )  # fmt: skip
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_same_inputs_give_the_same_bytes_and_a_signature(tmp_path: Path) -> None:
    archive = packed(tmp_path, "1.0")
    first = archive.read_bytes()
    assert packed(tmp_path, "1.0").read_bytes() == first
    sums = archive.with_name("SHA256SUMS")
    assert sums.read_text() == f"{hashlib.sha256(first).hexdigest()}  {archive.name}\n"
    KEY.public_key().verify(archive.with_name("SHA256SUMS.sig").read_bytes(), sums.read_bytes())


def test_the_archive_says_what_is_in_it(tmp_path: Path) -> None:
    with tarfile.open(packed(tmp_path, "1.0")) as archive:
        entries = archive.getmembers()
        bill = archive.extractfile("asyncgrpo-agent-1.0/sbom.cdx.json")
        assert bill is not None
        components = {one["name"] for one in json.load(bill)["components"]}
    names = [entry.name for entry in entries]
    assert names == [names[0], *sorted(names[1:], key=lambda name: Path(name).parts)]
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries} == {(0, 0, 1700000000)}
    assert {"trio", "h2", "cryptography", "CPython"} <= components
    assert "asyncgrpo-agent-1.0/LICENSES/trio/LICENSE" in names


def test_install_is_idempotent_and_works_from_the_command_line(host: Host) -> None:
    unpacked = host.unpack("1.0")
    assert host.run(unpacked).returncode == 0
    assert host.version() == "1.0"
    link = os.readlink(host.root / "usr/local/bin/asyncgrpo-agent")
    assert link == "/opt/asyncgrpo-agent/current/agent/asyncgrpo-agent"
    assert (host.root / "etc/systemd/system/asyncgrpo-replica@.service").exists()
    before = host.files()
    assert host.run(unpacked).returncode == 0
    assert host.files() == before


def test_upgrade_and_rollback_keep_configuration_and_state(host: Host) -> None:
    old, new, newest = (host.unpack(version) for version in ("1.0", "1.1", "1.2"))
    assert host.run(old).returncode == 0
    kept = [host.root / "etc/asyncgrpo-agent/replica.toml", host.root / "var/lib/asyncgrpo-agent/x"]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    assert host.run(new).returncode == 0
    assert host.version() == "1.1"
    assert host.run(new, "rollback").returncode == 0
    assert host.version() == "1.0"
    assert host.run(new, "rollback").returncode == 0
    assert host.version() == "1.1"
    assert host.run(newest).returncode == 0
    versions = host.root / "opt/asyncgrpo-agent/versions"
    assert sorted(folder.name for folder in versions.iterdir()) == ["1.1", "1.2"]
    assert host.run(newest, "uninstall").returncode == 0
    assert [file.read_text() for file in kept] == ["mine", "mine"]
    left = [
        name for name in host.files() if "opt/asyncgrpo-agent" in name or "systemd/system/" in name
    ]
    assert left == []
    assert host.run(newest, "uninstall").returncode == 0


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "added", "unlisted"])
def test_a_broken_archive_changes_nothing(host: Host, damage: str) -> None:
    good, bad = host.unpack("1.0"), host.unpack("1.1")
    assert host.run(good).returncode == 0
    before = host.files()
    program = bad / "agent" / "asyncgrpo-agent"
    match damage:
        case "changed":
            program.write_text("#!/bin/sh\necho evil\n")
        case "cut":
            program.write_bytes(program.read_bytes()[:-1])
        case "missing":
            program.unlink()
        case "added":
            (bad / "systemd" / "evil.service").touch()
        case "unlisted":
            (bad / "FILES.sha256").unlink()
    done = host.run(bad)
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr
    assert host.files() == before
    assert host.run(good, "rollback").returncode == 1
