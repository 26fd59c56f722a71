#!/usr/bin/env python3
"""Pack what scripts/build made into an archive that installs without a network.

Beside the archive go SHA256SUMS and, with a key, its Ed25519 signature. The same inputs give the
same bytes: entries are sorted, their times and owners fixed. Run by scripts/package.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from contents import Distribution, Part, bill_of_materials, copy_licences, distributions
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
# What `--role local` needs to train a tiny model: configuration, model, data, reward.
DEMO_FOLDER = "scripts/demo_task"
DEMO = ("demo.toml", "model", "train.jsonl", "heldout.jsonl", "rewards.py")


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
    assemble(tree, options, epoch_s)
    archive = options.dist / f"{name}-linux-x86_64{suffix}.tar.gz"
    pack(tree, archive, epoch_s, level=6 if options.engine == "none" else 1)
    shutil.rmtree(tree.parent)
    sums = options.dist / "SHA256SUMS"
    archives = sorted(options.dist.glob(f"{name}-linux-x86_64*.tar.gz"))
    sums.write_text("".join(f"{sha256(one)}  {one.name}\n" for one in archives))
    sign(sums, options.key)
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")
    return 0


def assemble(tree: Path, options: argparse.Namespace, epoch_s: int) -> None:
    shutil.rmtree(tree.parent, ignore_errors=True)
    tree.mkdir(parents=True)
    shutil.copytree(options.agent, tree / "agent", symlinks=True)
    if options.engine != "none":
        shutil.copytree(options.engine_folder, tree / "engine", symlinks=True, copy_function=linked)
    for folder in ("systemd", "examples", "prometheus", "grafana"):
        shutil.copytree(ROOT / "packaging" / folder, tree / folder)
    (tree / "demo").mkdir()
    for name in DEMO:
        copy = shutil.copytree if (ROOT / DEMO_FOLDER / name).is_dir() else shutil.copy
        copy(ROOT / DEMO_FOLDER / name, tree / "demo" / name)
    shutil.copy(ROOT / "packaging" / "install.sh", tree)
    shutil.copy(ROOT / "packaging" / "CHANGELOG.md", tree)
    shutil.copy(ROOT / "README.md", tree)
    (tree / "VERSION").write_text(f"{options.version}\n")
    parts = [agent_part(options.agent)]
    if options.engine != "none":
        parts.append(engine_part(options.engine_folder))
    copy_licences(tree / "LICENSES", parts)
    bill = bill_of_materials(options.version, parts, epoch_s)
    (tree / "sbom.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    files = sorted(file for file in tree.rglob("*") if file.is_file() and not file.is_symlink())
    lines = [f"{sha256(file)}  ./{file.relative_to(tree).as_posix()}\n" for file in files]
    (tree / SUMS).write_text("".join(lines))


def linked(source: str, target: str) -> None:
    """An engine has gigabytes; both folders are on one disk."""
    os.link(source, target)


# --- what is inside -------------------------------------------------------------------------


def agent_part(folder: Path) -> Part:
    said = subprocess.run([folder / "asyncgrpo-agent", "--version"], capture_output=True, text=True)
    python = re.search(r"Python (\d+\.\d+\.\d+)", said.stdout)
    if python is None:
        raise SystemExit(f"{folder}/asyncgrpo-agent does not run here: {said.stderr}")
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    libraries = folder.with_name(f"{folder.name}-libraries")
    web = ROOT / "agent/asyncgrpo_agent/web/vendor"
    return Part("agent", agent_distributions(), python[1], licence, libraries, web)


def agent_distributions() -> list[Distribution]:
    """Of the environment that PyInstaller ran in: those of the lock less the tools."""
    lock = (ROOT / "build/requirements/frozen.lock").read_text()
    names = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) - TOOLS
    return [d for d in distributions() if d.metadata["Name"].lower().replace("_", "-") in names]


def engine_part(folder: Path) -> Part:
    command = [folder / "bin" / "python", "-I", "-B", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]
    (standard,) = folder.glob("lib/python3.*/")
    found = distributions([str(standard / "site-packages")])
    libraries = folder.with_name(f"{folder.name}-libraries")
    return Part("engine", found, said, standard / "LICENSE.txt", libraries)


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
