"""The archive and its install.sh, in a root of their own, with a stand-in for the frozen agent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess  # noqa: TID251 - scripts are run as a user runs them
import tarfile
from pathlib import Path

import pytest

from fakes.archives import KEY, packed, printing_agent, unpacked


def stand_in(folder: Path, version: str) -> Path:
    dist = folder / f"dist-{version}"
    return packed(dist, printing_agent(dist, version), version)


class Host:
    """An empty root, and the folders that archives were unpacked to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.root.mkdir()

    def unpack(self, version: str) -> Path:
        return unpacked(stand_in(self.folder, version), self.folder / "unpacked")

    def run(self, unpacked: Path, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(unpacked / "install.sh"), *words, "--root", str(self.root)]
        return subprocess.run(argv, capture_output=True, text=True)

    def version(self) -> str:
        program = self.root / "opt/asyncgrpo-agent/current/agent/asyncgrpo-agent"
        said = subprocess.run([str(program)], capture_output=True, text=True).stdout
        return said.removeprefix("asyncgrpo-agent ").partition(",")[0]

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
    archive = stand_in(tmp_path, "1.0")
    first = archive.read_bytes()
    assert stand_in(tmp_path, "1.0").read_bytes() == first
    sums = archive.with_name("SHA256SUMS")
    assert sums.read_text() == f"{hashlib.sha256(first).hexdigest()}  {archive.name}\n"
    KEY.public_key().verify(archive.with_name("SHA256SUMS.sig").read_bytes(), sums.read_bytes())


def test_the_archive_says_what_is_in_it(tmp_path: Path) -> None:
    with tarfile.open(stand_in(tmp_path, "1.0")) as archive:
        entries = archive.getmembers()
        bill = archive.extractfile("asyncgrpo-agent-1.0/sbom.cdx.json")
        assert bill is not None
        components = {one["name"]: one for one in json.load(bill)["components"]}
        index = archive.extractfile("asyncgrpo-agent-1.0/LICENSES/INDEX.tsv")
        assert index is not None
        licences = [line.split("\t") for line in index.read().decode().splitlines()]
    names = [entry.name for entry in entries]
    assert names == [names[0], *sorted(names[1:], key=lambda name: Path(name).parts)]
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries} == {(0, 0, 1700000000)}
    assert {"trio", "h2", "cryptography", "CPython", "libz1"} <= set(components)
    assert components["CPython"]["version"] == "3.11.2"  # what the agent says of itself
    assert len({one["bom-ref"] for one in components.values()}) == len(components)
    assert all(part == "agent" and licence for part, _, licence in licences)
    assert {"demo.toml", "train.jsonl", "heldout.jsonl", "rewards.py", "model"} == {
        Path(name).name for name in names if Path(name).parent == Path("asyncgrpo-agent-1.0/demo")
    }
    folder = "asyncgrpo-agent-1.0/LICENSES/agent"
    for file in ("trio/LICENSE", "libz1/copyright", "CPython/LICENSE.txt"):
        assert f"{folder}/{file}" in names


def test_the_sums_are_of_all_archives_of_a_version(tmp_path: Path) -> None:
    """Those with and without an engine are released together."""
    archive = stand_in(tmp_path, "1.0")
    other = archive.with_name("asyncgrpo-agent-1.0-linux-x86_64-cpu.tar.gz")
    other.write_bytes(b"another")
    archive.with_name("asyncgrpo-agent-0.9-linux-x86_64.tar.gz").touch()
    stand_in(tmp_path, "1.0")
    lines = archive.with_name("SHA256SUMS").read_text().splitlines()
    assert [line.partition("  ")[2] for line in lines] == [other.name, archive.name]


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


def test_the_files_of_a_running_agent_stay(host: Host) -> None:
    """An agent, and its engine even more, reads files of its version long after its start."""
    first, second, third, fourth = (host.unpack(f"1.{number}") for number in range(4))
    assert host.run(first).returncode == 0
    versions = host.root / "opt/asyncgrpo-agent/versions"
    program = versions / "1.0" / "agent" / "runs"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "300"]) as running:
        assert host.run(second).returncode == host.run(third).returncode == 0
        assert {folder.name for folder in versions.iterdir()} == {"1.0", "1.1", "1.2"}
        running.kill()
    assert host.run(fourth).returncode == 0
    assert {folder.name for folder in versions.iterdir()} == {"1.2", "1.3"}


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


def run_on(unpacked: Path, system: str, machine: str) -> subprocess.CompletedProcess[str]:
    """Without --root, and without a program that could change anything on this host."""
    tools = unpacked.parent / "tools"
    tools.mkdir()
    for name in ("sh", "cat", "dirname", "find", "head", "sha256sum", "wc"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    uname = tools / "uname"
    uname.write_text(f"#!/bin/sh\ncase $1 in -s) echo {system} ;; *) echo {machine} ;; esac\n")
    uname.chmod(0o755)
    argv = [str(unpacked / "install.sh")]
    return subprocess.run(argv, env={"PATH": str(tools)}, capture_output=True, text=True)


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_other_hosts_are_refused_by_name(tmp_path: Path, system: str, machine: str) -> None:
    done = run_on(Host(tmp_path).unpack("1.0"), system, machine)
    assert done.returncode == 1
    assert f"{system} on {machine} is not supported" in done.stderr
    assert "nothing was changed" in done.stderr


def test_a_host_that_is_too_old_is_told_which_glibc_is_missing(tmp_path: Path) -> None:
    agent = printing_agent(tmp_path / "dist", "1.0")
    archive = packed(tmp_path / "dist", agent, "1.0")
    folder = unpacked(archive, tmp_path)
    program = folder / "agent/asyncgrpo-agent"
    sums = folder / "FILES.sha256"
    before = hashlib.sha256(program.read_bytes()).hexdigest()
    program.write_text("#!/bin/sh\necho libc.so.6: version GLIBC_2.31 not found >&2\nexit 1\n")
    after = hashlib.sha256(program.read_bytes()).hexdigest()
    sums.write_text(sums.read_text().replace(before, after))
    done = run_on(folder, "Linux", "x86_64")
    assert done.returncode == 1
    assert "GLIBC_2.31 not found" in done.stderr
    assert "nothing was changed" in done.stderr
