"""Archives as scripts/package makes them, around any folder that has an agent."""

from __future__ import annotations

import json
import os
import subprocess  # noqa: TID251 - scripts are run as a user runs them
import sys
import tarfile
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ROOT: Final = Path(__file__).parents[2]
KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(32))


def printing_agent(folder: Path, version: str) -> Path:
    """A stand-in for the frozen agent, which prints that version."""
    agent = folder / "onedir"
    (agent / "_internal").mkdir(parents=True, exist_ok=True)
    program = agent / "asyncgrpo-agent"
    program.write_text(f"#!/bin/sh\necho asyncgrpo-agent {version}, Python 3.11.2\n")
    program.chmod(0o755)
    (agent / "_internal" / "empty").touch()
    libraries = folder / "onedir-libraries"
    (libraries / "libz1").mkdir(parents=True, exist_ok=True)
    (libraries / "libz1" / "copyright").write_text("may be given away\n")
    row = {
        "library": "libz.so.1",
        "package": "libz1",
        "version": "1.2",
        "purl": "pkg:deb/libz1@1.2",
    }
    (libraries / "libraries.json").write_text(json.dumps([row]))
    return agent


def packed(dist: Path, agent: Path, version: str) -> Path:
    """The archive of `agent` as `version`, in `dist`, signed with KEY."""
    dist.mkdir(exist_ok=True)
    key = dist / "key.pem"
    key.write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    argv = [sys.executable, str(ROOT / "build" / "package.py"), f"--dist={dist}", f"--key={key}"]
    words = [f"--agent={agent}", f"--version={version}", "--engine=none"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([*argv, *words], env=env, check=True, capture_output=True)
    return dist / f"asyncgrpo-agent-{version}-linux-x86_64.tar.gz"


def unpacked(archive: Path, folder: Path) -> Path:
    """The folder with install.sh, in `folder`."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
        return folder / opened.getnames()[0]
