#!/usr/bin/env python3
"""Which glibc a folder of programs and libraries needs.

    oldest_glibc.py FOLDER [--max 2.31]

Prints the highest version that any file asks for, and the files that do. With `--max` the exit
code is 1 if it is higher, and so stops a build that old hosts could not run.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max", default="")
    options = parser.parse_args()
    files = defaultdict(list)
    for file in sorted(options.folder.rglob("*")):
        if is_elf(file):
            files[needed(file)].append(file.relative_to(options.folder))
    highest = max(files)
    names = ", ".join(map(str, files[highest][:SHOWN]))
    print(f"{options.folder}: needs glibc {'.'.join(map(str, highest))} ({names})")
    if options.max and highest > version(options.max):
        print(f"{options.folder}: should run with glibc {options.max}", file=sys.stderr)
        return 1
    return 0


def is_elf(file: Path) -> bool:
    if not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


def needed(file: Path) -> tuple[int, ...]:
    """The highest version of glibc's symbols that `file` uses; (0,) for none."""
    done = subprocess.run(
        ["readelf", "--wide", "--version-info", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    return max(map(version, re.findall(r"Name: GLIBC_(\d[\d.]*)", done.stdout)), default=(0,))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


if __name__ == "__main__":
    sys.exit(main())
