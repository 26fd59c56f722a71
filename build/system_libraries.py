#!/usr/bin/env python3
"""Which of the build host's own libraries a folder holds, and under which licences.

    system_libraries.py FOLDER OUTPUT

Writes OUTPUT/libraries.json, rows of library, package, version and purl, and for each package
OUTPUT/PACKAGE/copyright. Debian knows its own; what was built on the host from source is described
in the Python's prefix by share/made/PACKAGE/ with `version`, `copyright` and `libraries`, a name a
line. A library of unknown origin ends the build, for it could not be given away. What is a link is
of a wheel, whose own licence tells of it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

MADE = Path(sys.base_prefix) / "share" / "made"
PYTHON = re.compile(r"libpython3[.\d]*\.so")  # its licence comes with its standard library


def main() -> int:
    folder, output = map(Path, sys.argv[1:])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    made = from_source()
    rows = []
    files = [file for file in folder.glob("lib*.so*") if not file.is_symlink()]
    for library in sorted(file.name for file in files):
        if PYTHON.match(library):
            continue
        package, version, copyright_file = made.get(library) or from_debian(library)
        (output / package).mkdir(exist_ok=True)
        shutil.copyfile(copyright_file, output / package / "copyright")
        kind = "generic" if library in made else "deb/debian"
        purl = f"pkg:{kind}/{package}@{version.replace('+', '%2B')}"
        rows.append({"library": library, "package": package, "version": version, "purl": purl})
    (output / "libraries.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def from_source() -> dict[str, tuple[str, str, Path]]:
    found = {}
    for folder in sorted(MADE.glob("*/")):
        version = (folder / "version").read_text().strip()
        for library in (folder / "libraries").read_text().split():
            found[library] = (folder.name, version, folder / "copyright")
    return found


def from_debian(library: str) -> tuple[str, str, Path]:
    said = run("dpkg-query", "--search", f"*/{library}")
    # Of several packages, the one that has it where programs of this machine look for it.
    packages = re.findall(r"(?m)^([^:,\s]+)\S*: (?:/usr)?/lib/x86_64-linux-gnu/[^/]+$", said)
    if not packages:
        raise SystemExit(f"{library}: Debian does not say which package it is of")
    package = packages[0]
    version = run("dpkg-query", "--show", "--showformat", "${source:Version}\n", package)
    return package, version.split()[0], Path("/usr/share/doc") / package / "copyright"


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
