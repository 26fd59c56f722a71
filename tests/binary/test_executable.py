"""The frozen agent by itself: its size, its start, its end, and folders that it cannot use."""

from __future__ import annotations

import json
import os
import signal
import subprocess  # noqa: TID251 - a program is run as a user runs it
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncgrpo_agent import __version__
from fakes.fleet import Agent, Hosts, free_address, hosts, wait_until_none
from fakes.histories import simulated

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ONE_FILE_MAX_BYTES = 30 * MIB
TRIES = 3  # on a shared machine the quickest start says what the program takes


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)), env={**os.environ, **env}, capture_output=True, text=True
    )


def test_the_one_file_is_small(onefile: Path) -> None:
    assert onefile.stat().st_size <= ONE_FILE_MAX_BYTES


def test_both_forms_say_what_they_are(program: Path) -> None:
    done = run(program, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"asyncgrpo-agent {__version__} (binary), Python 3.")


def test_how_quickly_it_starts(program: Path) -> None:
    """A figure, for a shared machine proves nothing: 1.5 s as one file, 0.6 s as a folder."""
    taken_s = []
    for _ in range(TRIES):
        began = time.monotonic()
        assert run(program, "--version").returncode == 0
        taken_s.append(time.monotonic() - began)
    print(f"{program.parent.name}: starts in {min(taken_s):.2f} s")  # noqa: T201 - by pytest -s


def test_the_engine_side_is_there_as_source(onedir: Path) -> None:
    source, shipped = ROOT / "agent/asyncgrpo_engine", onedir.parent / "_internal/asyncgrpo_engine"
    texts = {file.name: file.read_bytes() for file in source.glob("*.py")}
    assert {file.name: file.read_bytes() for file in shipped.iterdir()} == texts


def test_a_report_has_its_charts_as_images(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "demo" / "history.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in simulated(30, resume_at=None)))
    out = tmp_path / "out"
    words = ("report", "demo", f"--state-dir={tmp_path}", f"--output={out}", "--png")
    done = run(program, *words)
    assert done.returncode == 0, done.stderr
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def here(program: Path, tmp_path: Path) -> Iterator[Hosts]:
    with hosts(tmp_path) as started:
        started.program = [str(program)]
        yield started
    wait_until_none(str(tmp_path))


def test_sigterm_ends_it_and_leaves_nothing_behind(here: Hosts) -> None:
    unpacked = here.folder / "tmp"
    unpacked.mkdir()
    proxy = start_proxy(here, TMPDIR=str(unpacked))
    proxy.wait_for("proxy.listening")
    assert proxy.end(signal.SIGTERM) == 0, proxy.text()
    assert list(unpacked.iterdir()) == []


def start_proxy(here: Hosts, **env: str) -> Agent:
    flags = ["--role=proxy", f"--listen={free_address()}", f"--state-dir={here.folder}/state"]
    return here.start("proxy", *flags, env=env)


def test_sigkill_of_the_process_that_was_started_ends_it_all(here: Hosts) -> None:
    proxy = start_proxy(here, TMPDIR=str(here.folder))
    proxy.wait_for("proxy.listening")
    proxy.end(signal.SIGKILL)
    wait_until_none(str(here.folder), patience_s=5)


# --- folders that cannot be used ----------------------------------------------------------------


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small disk of its own at `folder`."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder.mkdir()
    done = run("mount", "-t", "tmpfs", "-o", options, "tmpfs", folder)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        run("umount", "--lazy", folder)


def test_a_tmpdir_without_programs_stops_the_one_file_only(
    onefile: Path, onedir: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "tmp", "noexec") as folder:
        done = run(onefile, "--version", TMPDIR=str(folder))
        assert done.returncode != 0
        assert "failed to map segment from shared object" in done.stderr
        assert run(onedir, "--version", TMPDIR=str(folder)).returncode == 0


def test_a_full_tmpdir_stops_the_one_file_only(onefile: Path, onedir: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "tmp", "size=8m") as folder:
        done = run(onefile, "--version", TMPDIR=str(folder))
        assert done.returncode != 0
        assert "Failed to extract" in done.stderr
        assert run(onedir, "--version", TMPDIR=str(folder)).returncode == 0


def test_a_full_disk_for_its_state_is_an_error_with_a_name(onedir: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "state", "size=64k") as folder:
        (folder / "filler").write_bytes(bytes(1 << 15))
        with pytest.raises(OSError, match="No space"):
            (folder / "rest").write_bytes(bytes(1 << 20))
        flags = ["--role=proxy", f"--listen={free_address()}", f"--state-dir={folder}"]
        done = run(onedir, *flags)
    assert done.returncode in (1, 78), done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
