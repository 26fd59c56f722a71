"""A base model as a folder for hosts without a hub, in which every file can be checked.

    <folder>/config.json, *.safetensors, ...     the model
    <folder>/asyncgrpo-model.json                where it is from
    <folder>/SHA256SUMS                          of all the others, as `sha256sum --check` reads it

A pack is written whole or not at all. It is checked when it is used: every byte, once, and again
when a file has changed by its size or times.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import msgspec

from asyncgrpo_agent.errors import ConfigError, StoreError
from asyncgrpo_agent.store import private_files

ABOUT: Final = "asyncgrpo-model.json"
SUMS: Final = "SHA256SUMS"
FORMAT: Final = 1
# What engines read; more of these in a folder would be read as well.
_READ: Final = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
_KEPT: Final = (*_READ, "LICENSE*", "NOTICE*", "README.md")
_LINE: Final = re.compile(r"([0-9a-f]{64})  ([^/\x00-\x1f]+(?:/[^/\x00-\x1f]+)*)")
_CHUNK_BYTES: Final = 1 << 20
_COPY_AGAIN: Final = "Copy the pack again, from where it was made"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`id` and `commit` are empty for a model that came from a folder."""

    format: int = FORMAT
    id: str = ""
    commit: str = ""


class _Stamp(msgspec.Struct, frozen=True, kw_only=True):
    sums: str  # sha256 of SHA256SUMS
    files: dict[str, tuple[int, int, int]]  # bytes, mtime, inode


def is_pack(folder: Path) -> bool:
    return (folder / SUMS).is_file() and (folder / ABOUT).is_file()


def about(folder: Path) -> About:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(folder, [f"{ABOUT} cannot be read ({error})"]) from error


def files_of(folder: Path) -> dict[str, int]:
    """The files of a model in a plain folder that belong into a pack, with their sizes."""
    return {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name != ABOUT
        and any(fnmatchcase(path.name, pattern) for pattern in _KEPT)
    }


def write(source: Path, names: Mapping[str, int], target: Path, made_from: About) -> int:
    """Copy `names` of `source` into the pack `target`; its bytes. Raises StoreError, ConfigError.

    Nothing is there unless all of it is.
    """
    if target.exists():
        raise ConfigError("is there already", where=str(target), fix="Give a folder that is not")
    part = target.with_name(target.name + ".part")
    with _whole_or_gone(part, target):
        part.mkdir(parents=True)
        sums = {name: _copied(source / name, part / name) for name in names}
        sums[ABOUT] = _written(part / ABOUT, msgspec.json.format(msgspec.json.encode(made_from)))
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        _written(part / SUMS, lines.encode())
        for folder in {path.parent for path in part.rglob("*")}:
            _sync(folder)
        part.rename(target)
        _sync(target.parent)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def verify(folder: Path, stamps: Path | None) -> None:
    """Raise ConfigError that names each file which is damaged, missing or not of the pack.

    What was found whole is noted in the folder `stamps`, and not read again until it changes.
    """
    sums = _sums(folder)
    stamp = _stamp_of(folder, sums)
    file = None
    if stamps is not None:
        key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        file = stamps / f"pack-{key}.json"
        if stamp is not None and _read_stamp(file) == stamp:
            return
    if faults := [*_faults(folder, sums), *_strangers(folder, sums)]:
        raise _damaged(folder, faults)
    if file is not None and stamp is not None:
        try:
            private_files.private_folder(file.parent)
            private_files.write(file, msgspec.json.encode(stamp))
        except OSError:  # then it is read again at the next start
            return


def amount(count: int, total: int) -> str:
    """As "1.2 of 3.4 GB"."""
    unit, size = ("GB", 1e9) if total >= 100_000_000 else ("MB", 1e6)
    return f"{count / size:.1f} of {total / size:.1f} {unit}"


def _sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(folder, [f"{SUMS} cannot be read ({error})"]) from error
    found = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or ".." in match[2].split("/"):
            raise _damaged(folder, [f"{SUMS} is damaged"])
        found[match[2]] = match[1]
    if ABOUT not in found or "config.json" not in found:
        raise _damaged(folder, [f"{SUMS} is cut"])
    return found


def _faults(folder: Path, sums: Mapping[str, str]) -> Iterator[str]:
    for name, digest in sums.items():
        try:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    yield f"{name} is damaged"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"


def _strangers(folder: Path, sums: Mapping[str, str]) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.name not in sums and any(fnmatchcase(path.name, pattern) for pattern in _READ):
            yield f"{path.name} is not of the pack"


def _stamp_of(folder: Path, sums: Mapping[str, str]) -> _Stamp | None:
    """None where a file is missing."""
    names = [*sums, *(path.name for path in folder.iterdir() if path.name not in sums)]
    files = {}
    try:
        for name in names:
            found = (folder / name).stat()
            files[name] = (found.st_size, found.st_mtime_ns, found.st_ino)
        digest = hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()
    except OSError:
        return None
    return _Stamp(sums=digest, files=files)


def _read_stamp(file: Path) -> _Stamp | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Stamp)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def _whole_or_gone(part: Path, target: Path) -> Iterator[None]:
    shutil.rmtree(part, ignore_errors=True)  # of one that was killed
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(
            f"the pack cannot be written: {error.strerror}",
            where=str(error.filename or target),
            fix="Make room there, or give a folder on a larger disk" if is_full else "",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copied(source: Path, target: Path) -> str:
    """Copy one file; its sha256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as old, target.open("xb") as new:
        while chunk := old.read(_CHUNK_BYTES):
            digest.update(chunk)
            new.write(chunk)
        new.flush()
        os.fsync(new.fileno())
    return digest.hexdigest()


def _written(path: Path, data: bytes) -> str:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(folder: Path, faults: list[str]) -> ConfigError:
    return ConfigError("; ".join(faults), where=f"model.path {folder}", fix=_COPY_AGAIN)
