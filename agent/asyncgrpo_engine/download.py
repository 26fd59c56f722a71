"""`python -m asyncgrpo_engine.download ID REVISION [--trust-remote-code]`: a model from its hub.

What is loaded is the files of one commit that vLLM and TRL read, into the hub's own cache, which is
shared with everything else of this user ($HF_HOME). Each line of standard output is JSON:

    {"progress": {"commit": ..., "bytes": 1200, "of_bytes": 3400}}      now and then
    {"files": {NAME: BYTES}}                                            some of them at a time
    {"model": {"commit": ..., "folder": ...}}                           the last line, if it is here
    {"error": {"problems": [...]}}                                      the last line, if it is not

Exit code 78 says that another try would not help, 1 that it may. What was loaded stays in any case,
and the next start goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fnmatch
import glob
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from asyncgrpo_engine.problems import EXIT_CONFIG, Problem, RefusedError, from_exception, report

PROGRESS_S: Final = 1.0
_LEFT_S: Final = 3600.0  # a part that nobody has written to for so long is nobody's
_PART: Final = ".incomplete"
_FILES_A_LINE: Final = 50  # the agent cuts long lines
DEFAULT_HUB: Final = "https://huggingface.co"
# What vLLM and TRL read of a model; weights in other formats are the same bytes again.
_WANTED: Final = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_CODE: Final = "*.py"
_TEMPLATES: Final = "additional_chat_templates"
_COPY: Final = "consolidated*.safetensors"  # all weights once more, in their maker's own layout
_OF_GATE: Final = "Accept the model's terms on the hub, and set HF_TOKEN to a token of that account"
_WEIGHTS: Final = "Choose a model with *.safetensors, or convert it and give model.path"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncgrpo_engine.download")
    parser.add_argument("id", help="OWNER/NAME")
    parser.add_argument("revision", help="branch, tag or commit")
    parser.add_argument("--trust-remote-code", action="store_true", help="load *.py, too")
    options = parser.parse_args(argv)
    try:
        told = load(options.id, options.revision, has_code=options.trust_remote_code)
    except RefusedError as error:
        report(error.problems)
        return EXIT_CONFIG
    except Exception as error:  # whatever a library or the network comes up with
        report([_passing(error, options.id)])
        return 1
    files = list(told.pop("files").items())
    for at in range(0, len(files), _FILES_A_LINE):
        _say({"files": dict(files[at : at + _FILES_A_LINE])})
    _say({"model": told})
    return 0


def load(model: str, revision: str, *, has_code: bool) -> dict[str, Any]:
    """Commit, folder and sizes of a model that is whole on this host's disk.

    Raises RefusedError for what another try would not mend.
    """
    hub = _hub()
    with _explained(model, revision):
        info = hub.HfApi().model_info(model, revision=revision, files_metadata=True)
        rows = {row.rfilename: row for row in info.siblings or ()}
        sizes = {name: int(row.size or 0) for name, row in rows.items()}
        files = wanted(sizes, has_code=has_code)
        _check(model, files)
        blobs = {_blob_name(rows[name]): size for name, size in files.items()}
        cache = Path(hub.constants.HF_HUB_CACHE) / hub.file_download.repo_folder_name(
            repo_id=model, repo_type="model"
        )
        _sweep(cache / "blobs", blobs)
        _check_room(cache, blobs)
        with _told(cache / "blobs", str(info.sha), blobs):
            folder = hub.snapshot_download(
                model, revision=info.sha, allow_patterns=[glob.escape(name) for name in files]
            )
    return {"commit": info.sha, "folder": folder, "files": files}


def wanted(sizes: Mapping[str, int], *, has_code: bool) -> dict[str, int]:
    """Of all files of a model those that are needed, with their sizes."""
    patterns = (*_WANTED, *((_CODE,) if has_code else ()))
    found = {
        name: size
        for name, size in sorted(sizes.items())
        if name.rpartition("/")[0] in ("", _TEMPLATES)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    copies = {name for name in found if fnmatch.fnmatchcase(name, _COPY)}
    if any(name.endswith(".safetensors") for name in found.keys() - copies):
        return {name: size for name, size in found.items() if name not in copies}
    return found


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.file_download
    except ImportError as error:
        fix = "Give the Python that has vLLM or TRL"
        raise RefusedError(
            [Problem(what="it has no huggingface_hub", where="engine.python", fix=fix)]
        ) from error
    huggingface_hub.utils.disable_progress_bars()
    return huggingface_hub


def _check(model: str, files: Mapping[str, int]) -> None:
    if "config.json" not in files:
        _refuse(f"{model} has no config.json", fix="Give the id of a language model")
    if not any(name.endswith(".safetensors") for name in files):
        _refuse(f"{model} has no *.safetensors file", fix=_WEIGHTS)


def _blob_name(row: Any) -> str:
    """What the cache calls the file: large ones by their sha256, others by git's own hash."""
    return str(row.lfs.sha256 if row.lfs is not None else row.blob_id)


def _sweep(folder: Path, blobs: Mapping[str, int]) -> None:
    """Remove what killed downloads left: nobody goes on with it, and a host may be killed often."""
    for blob, name in _blobs(folder):
        if blob.endswith(_PART) and name in blobs:
            path = folder / blob
            with contextlib.suppress(OSError):  # it has just been renamed
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    path.unlink()


def _check_room(cache: Path, blobs: Mapping[str, int]) -> None:
    """A disk that is going to be full half an hour later is said now."""
    whole = {blob for blob, _ in _blobs(cache / "blobs")}
    missing = sum(size for name, size in blobs.items() if name not in whole)
    home = cache
    while not home.exists():
        home = home.parent
    free = shutil.disk_usage(home).free
    if free < missing:
        _refuse(
            f"{_size(missing)} are still to be loaded, and {home} has {_size(free)} free",
            where="disk",
            fix="Make room, or set HF_HOME to a folder on a larger disk",
        )


@contextmanager
def _told(folder: Path, commit: str, blobs: Mapping[str, int]) -> Iterator[None]:
    """Say how far it has come, from what lies on the disk: libraries load in ways of their own."""
    total, done, began = sum(blobs.values()), threading.Event(), time.time()

    def tell() -> None:
        before, is_last = -1, False
        while True:
            loaded = _loaded_bytes(folder, blobs, began)
            if loaded != before:
                before = loaded
                _say({"progress": {"commit": commit, "bytes": loaded, "of_bytes": total}})
            if is_last:
                return
            is_last = done.wait(PROGRESS_S)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _loaded_bytes(folder: Path, blobs: Mapping[str, int], began: float) -> int:
    """What is there of the files, with the parts that are written since `began` (unix time)."""
    found: dict[str, int] = {}
    for blob, name in _blobs(folder):
        with contextlib.suppress(OSError):  # it has just been renamed
            status = (folder / blob).stat()
            size = min(status.st_size, 512 * status.st_blocks)  # room may be taken in advance
            if blob in blobs:
                found[name] = blobs[name]
            elif name in blobs and status.st_mtime >= began:
                found[name] = max(found.get(name, 0), min(size, blobs[name]))
    return sum(found.values())


def _blobs(folder: Path) -> list[tuple[str, str]]:
    """The files of the cache, each with the name that it has, or will have when it is whole."""
    try:
        return [(name, name.partition(".")[0]) for name in os.listdir(folder)]
    except OSError:
        return []


@contextmanager
def _explained(model: str, revision: str) -> Iterator[None]:
    """Faults that only the user can mend, as RefusedError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        _refuse(f"{model} is gated, and this host may not load it", fix=_OF_GATE)
    except errors.RevisionNotFoundError:
        fix = "Give a branch, a tag or a commit that the model has"
        _refuse(f"{model} has no revision {revision}", where="model.revision", fix=fix)
    except errors.RepositoryNotFoundError:
        fix = "Correct the id; for a private model set HF_TOKEN"
        _refuse(f"the hub knows no model {model}, or does not show it to this host", fix=fix)
    except errors.HFValidationError:
        _refuse(f"{model!r} is no id of a model", fix="Give it as OWNER/NAME")
    except errors.OfflineModeIsEnabled:
        fix = "Unset HF_HUB_OFFLINE, or give model.path: `asyncgrpo-agent model pack` makes one"
        _refuse(f"{model} is not here, and HF_HUB_OFFLINE forbids to load it", fix=fix)
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403):
            _refuse(f"the hub refuses {model} with {status}", fix="Set HF_TOKEN to a good token")
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "Make room, or set HF_HOME to a folder on a larger disk"
            _refuse(f"the disk is full: {error.filename or model}", where="disk", fix=fix)
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            fix = "Set HF_HOME to a folder that this user may write to"
            _refuse(f"{error.strerror}: {error.filename}", where="HF_HOME", fix=fix)
        raise


def _refuse(what: str, *, fix: str, where: str = "model.id") -> NoReturn:
    raise RefusedError([Problem(what=what, where=where, fix=fix)])


def _passing(error: BaseException, model: str) -> Problem:
    """What another try may mend: the network, the hub."""
    where = os.environ.get("HF_ENDPOINT", DEFAULT_HUB)
    return from_exception(error, where=where, fix=f"See whether {where} can be reached for {model}")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 100_000_000 else f"{count / 1e6:.1f} MB"


def _say(row: Mapping[str, Any]) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
