from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from asyncgrpo_agent.core.mountpoint import MountSpec, mount_command
from asyncgrpo_agent.errors import ConfigError
from asyncgrpo_agent.procs.mount_s3 import environment, installed_version, secrets, unmount

SPEC = MountSpec(program="mount-s3", bucket="data", prefix="", mount_point="/m", writable=True)


def program(folder: Path, script: str) -> str:
    path = folder / "mount-s3"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_the_version_is_asked_for(tmp_path: Path) -> None:
    said = 'test "$*" = --version && echo mount-s3 1.23.0+x64'
    assert await installed_version(program(tmp_path, said)) == (1, 23, 0)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo libfuse.so.2: cannot open shared object >&2; exit 127", "exit code 127: libfuse"),
        ("echo s3fs 1.94", "does not answer as Mountpoint"),
    ],
)
async def test_what_is_no_mount_s3(tmp_path: Path, script: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await installed_version(program(tmp_path, script))


async def test_a_missing_program_is_a_matter_of_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bucket\.mount_s3: .*is not an executable file"):
        await installed_version(f"{tmp_path}/none")


def test_keys_of_the_environment_give_way_to_those_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    monkeypatch.setenv("ASYNCGRPO_JOIN", "secret")
    by_variable = environment(mount_command(SPEC, (1, 24, 0)))
    assert by_variable["AWS_SECRET_ACCESS_KEY"] == "of the environment"
    assert "ASYNCGRPO_JOIN" not in by_variable
    by_file = environment(mount_command(with_file("/keys"), (1, 24, 0)))
    assert "AWS_SECRET_ACCESS_KEY" not in by_file
    assert by_file["AWS_SHARED_CREDENTIALS_FILE"] == "/keys"


def with_file(file: str) -> MountSpec:
    return MountSpec(
        program="mount-s3",
        bucket="data",
        prefix="",
        mount_point="/m",
        writable=True,
        credentials_file=file,
    )


def test_secrets_are_known_so_that_they_can_be_hidden(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "[default]\naws_access_key_id = id\naws_secret_access_key = a%b\nregion = eu\n"
        "[run]\naws_session_token: token\n"
    )
    assert secrets(SPEC, {"AWS_SECRET_ACCESS_KEY": "env", "AWS_REGION": "eu"}) == ["env"]
    assert secrets(with_file(str(file)), {}) == ["id", "a%b", "token"]
    file.write_text("no section = 1")
    assert secrets(with_file(str(file)), {}) == []


async def test_what_is_not_mounted_cannot_be_unmounted(tmp_path: Path) -> None:
    assert "not" in await unmount(str(tmp_path), lazily=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("lazily", [False, True])
async def test_unmounting(tmp_path: Path, lazily: bool) -> None:
    await trio.run_process(["mount", "-t", "tmpfs", "x", str(tmp_path)])  # noqa: TID251
    assert await unmount(str(tmp_path), lazily=lazily) == ""
    assert not os.path.ismount(tmp_path)
