#!/usr/bin/env python3
"""Pack what scripts/build made into an archive that installs without a network.

Beside the archive go SHA256SUMS and, with a key, its Ed25519 signature. The same inputs give the
same bytes: entries are sorted, their times and owners fixed. Run by scripts/package.
"""

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

ROOT = Path(__file__).resolve().parent.parent
SUMS = "FILES.sha256"
CHUNK_BYTES = 1 << 20
# In frozen.lock, but not in what it makes.
TOOLS = {"altgraph", "packaging", "pyinstaller-hooks-contrib", "setuptools", "pygments"} | {
    "markdown-it-py",
    "mdurl",
    "pycparser",
}
LICENCE = re.compile(r"(?i)(licen[cs]e|copying|notice|authors)[^/]*$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, required=True)
    parser.add_argument("--agent", type=Path, required=True, help="the frozen agent's folder")
    parser.add_argument("--version", required=True)
    parser.add_argument("--engine", choices=["none", "cpu", "cuda"], required=True)
    parser.add_argument("--engine-folder", type=Path)
    parser.add_argument("--key", type=Path, help="Ed25519 private key, PEM")
    options = parser.parse_args()
    epoch_s = int(os.environ["SOURCE_DATE_EPOCH"])
    suffix = "" if options.engine == "none" else f"-{options.engine}"
    name = f"asyncgrpo-agent-{options.version}"
    tree = options.dist / "package" / name
    assemble(tree, options)
    archive = options.dist / f"{name}-linux-x86_64{suffix}.tar.gz"
    pack(tree, archive, epoch_s, level=6 if options.engine == "none" else 1)
    shutil.rmtree(tree.parent)
    sums = options.dist / "SHA256SUMS"
    sums.write_text(f"{sha256(archive)}  {archive.name}\n")
    sign(sums, options.key)
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")
    return 0


def assemble(tree: Path, options: argparse.Namespace) -> None:
    shutil.rmtree(tree.parent, ignore_errors=True)
    tree.mkdir(parents=True)
    shutil.copytree(options.agent, tree / "agent", symlinks=True)
    if options.engine != "none":
        shutil.copytree(options.engine_folder, tree / "engine", symlinks=True, copy_function=linked)
    for folder in ("systemd", "examples"):
        shutil.copytree(ROOT / "packaging" / folder, tree / folder)
    shutil.copy(ROOT / "packaging" / "install.sh", tree)
    shutil.copy(ROOT / "packaging" / "CHANGELOG.md", tree)
    shutil.copy(ROOT / "README.md", tree)
    (tree / "VERSION").write_text(f"{options.version}\n")
    shipped = agent_distributions()
    folders = [] if options.engine == "none" else list(options.engine_folder.glob("lib/python3*/"))
    engine = [d for f in folders for d in distributions([str(f / "site-packages")])]
    copy_licences(tree / "LICENSES", [*shipped, *engine], options.agent / "_internal")
    bill = bill_of_materials(options.version, [*shipped, *engine])
    (tree / "sbom.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    files = sorted(file for file in tree.rglob("*") if file.is_file() and not file.is_symlink())
    lines = [f"{sha256(file)}  ./{file.relative_to(tree).as_posix()}\n" for file in files]
    (tree / SUMS).write_text("".join(lines))


def linked(source: str, target: str) -> None:
    """An engine has gigabytes; both folders are on one disk."""
    os.link(source, target)


# --- what is inside -------------------------------------------------------------------------


def distributions(path: list[str] | None = None) -> list[importlib.metadata.Distribution]:
    found = importlib.metadata.distributions(**({} if path is None else {"path": path}))
    return sorted(found, key=lambda one: one.metadata["Name"].lower())


def agent_distributions() -> list[importlib.metadata.Distribution]:
    """Of the environment that PyInstaller ran in: those of the lock less the tools."""
    lock = (ROOT / "build/requirements/frozen.lock").read_text()
    names = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) - TOOLS
    return [d for d in distributions() if d.metadata["Name"].lower().replace("_", "-") in names]


def copy_licences(
    folder: Path, found: list[importlib.metadata.Distribution], libraries: Path
) -> None:
    for distribution in found:
        for file in distribution.files or []:
            if LICENCE.search(file.as_posix()) and ".dist-info/" in file.as_posix():
                source = Path(distribution.locate_file(file))
                keep(source, folder / distribution.metadata["Name"] / source.name)
    keep(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", folder / "Python" / "LICENSE.txt")
    for library in sorted(libraries.glob("lib*.so*")):  # of the host, where Debian says whose
        asked = ["dpkg-query", "--search", f"*/{library.name}"]
        if shutil.which(asked[0]) is None:
            return
        said = subprocess.run(asked, capture_output=True, text=True).stdout
        for package in sorted(set(re.findall(r"^([^:,\s]+)[:,]", said, re.MULTILINE))):
            copyright_file = Path("/usr/share/doc") / package / "copyright"
            keep(copyright_file, folder / library.name / "copyright")


def keep(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def bill_of_materials(
    version: str, found: list[importlib.metadata.Distribution]
) -> dict[str, object]:
    """CycloneDX 1.5; the same inputs give the same text, so it has no serial number."""
    components = [
        {
            "type": "library",
            "name": one.metadata["Name"],
            "version": one.version,
            "purl": f"pkg:pypi/{one.metadata['Name'].lower()}@{one.version}",
        }
        for one in found
    ]
    python = ".".join(map(str, sys.version_info[:3]))
    components.append({"type": "application", "name": "CPython", "version": python})
    about = {"type": "application", "name": "asyncgrpo-agent", "version": version}
    unique = {(one["name"], one["version"]): one for one in components}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": about},
        "components": list(unique.values()),
    }


# --- the archive ----------------------------------------------------------------------------


def pack(tree: Path, archive: Path, epoch_s: int, *, level: int) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch_s, 0, 0, "", ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with (
        archive.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=level, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        tar.inodes = {}
        for path in [tree, *sorted(tree.rglob("*"))]:
            entry = plain(tar.gettarinfo(str(path), arcname=str(path.relative_to(tree.parent))))
            if entry.islnk():  # of the engine's folder, where the packer linked it
                entry.type, entry.size, entry.linkname = tarfile.REGTYPE, path.stat().st_size, ""
            if entry.isreg():
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sign(sums: Path, key_file: Path | None) -> None:
    signature = sums.with_suffix(".sig")
    signature.unlink(missing_ok=True)
    if key_file is None:
        print("not signed: no --key", file=sys.stderr)
        return
    key = load_pem_private_key(key_file.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise SystemExit(f"{key_file}: not an Ed25519 key (openssl genpkey -algorithm ed25519)")
    signature.write_bytes(key.sign(sums.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
