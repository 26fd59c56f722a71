from __future__ import annotations

from dataclasses import replace

import pytest

from asyncgrpo_agent.core.mountpoint import (
    KEY_VARIABLES,
    MountSpec,
    Version,
    explain,
    mount_command,
    parse_version,
    redacted,
)
from asyncgrpo_agent.errors import ConfigError

NEWEST: Version = (1, 24, 0)
TRAINER = MountSpec(
    program="mount-s3", bucket="data", prefix="runs/", mount_point="/m", writable=True
)
REPLICA = replace(TRAINER, writable=False)
STORE = replace(
    REPLICA,
    endpoint_url="https://minio:9000",
    region="eu",
    force_path_style=True,
    credentials_file="/etc/keys",
    profile="run",
    ca_bundle="/etc/ca.pem",
    upload_checksums="off",
    memory_target_mib=1024,
)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("mount-s3 1.22.1", (1, 22, 1)),
        ("mount-s3 1.24.0+linux-x64\n", (1, 24, 0)),
        ("mount-s3 1.23.0-unofficial+abc1234.dirty", (1, 23, 0)),
        ("WARNING: something\nmount-s3 2.0.10", (2, 0, 10)),
    ],
)
def test_versions(said: str, version: Version) -> None:
    assert parse_version(said, "mount-s3") == version


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("mount-s3 1.22.0", "1.22.0: before 1.22 .* faulty. Install mount-s3 1.22.1 or newer"),
        ("mount-s3 1.9.9", "could not be opened again right after it was closed"),
        ("s3fs 1.94", "does not answer as Mountpoint"),
        ("", "does not answer as Mountpoint"),
    ],
)
def test_versions_not_to_work_with(said: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse_version(said, "mount-s3")
    assert caught.value.where == "bucket.mount_s3"


COMMON = ["mount-s3", "data", "/m", "--foreground", "--metadata-ttl=minimal"]
READING = ["--negative-metadata-ttl=minimal", "--read-only"]
MEMORY = "--memory-target=1024"
ELSEWHERE = [
    *("--prefix=runs/", "--endpoint-url=https://minio:9000", "--region=eu"),
    *("--force-path-style", "--profile=run", "--ca-bundle=/etc/ca.pem"),
]


@pytest.mark.parametrize(
    ("spec", "argv"),
    [
        (TRAINER, [*COMMON, "--allow-delete", "--prefix=runs/"]),
        (replace(TRAINER, allow_delete=False), [*COMMON, "--prefix=runs/"]),
        (replace(TRAINER, prefix=""), [*COMMON, "--allow-delete"]),
        (REPLICA, [*COMMON, *READING, "--prefix=runs/"]),
        (STORE, [*COMMON, *READING, *ELSEWHERE, MEMORY]),
        (
            replace(STORE, writable=True),
            [*COMMON, "--allow-delete", *ELSEWHERE, *("--upload-checksums=off", MEMORY)],
        ),
    ],
)
def test_command_lines(spec: MountSpec, argv: list[str]) -> None:
    assert list(mount_command(spec, NEWEST).argv) == argv


@pytest.mark.parametrize(
    ("spec", "additions", "removals"),
    [
        (TRAINER, {}, ()),
        (REPLICA, {"AWS_MAX_ATTEMPTS": "4"}, ()),
        (replace(TRAINER, profile="run"), {}, KEY_VARIABLES),
        (
            replace(TRAINER, credentials_file="/k"),
            {"AWS_SHARED_CREDENTIALS_FILE": "/k"},
            KEY_VARIABLES,
        ),
        (
            STORE,
            {
                "AWS_SHARED_CREDENTIALS_FILE": "/etc/keys",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_MAX_ATTEMPTS": "4",
            },
            KEY_VARIABLES,
        ),
    ],
)
def test_environments(
    spec: MountSpec, additions: dict[str, str], removals: tuple[str, ...]
) -> None:
    command = mount_command(spec, NEWEST)
    assert (command.additions, command.removals) == (additions, removals)


@pytest.mark.parametrize(
    ("spec", "version", "key"),
    [
        (STORE, (1, 22, 3), "bucket.ca_bundle"),
        (replace(TRAINER, upload_checksums="crc64nvme"), (1, 22, 1), "bucket.upload_checksums"),
    ],
)
def test_what_an_old_version_cannot_do(spec: MountSpec, version: Version, key: str) -> None:
    with pytest.raises(ConfigError, match=r"Install mount-s3 1\.23\.0") as caught:
        mount_command(spec, version)
    assert caught.value.where == key


def test_an_old_version_manages_its_memory_itself() -> None:
    command = mount_command(STORE, (1, 23, 0))
    assert not [word for word in command.argv if word.startswith("--memory")]
    assert command.ignored == ("bucket.memory_target_mib",)
    assert mount_command(STORE, NEWEST).ignored == ()


HEAD = "Error: Failed to create S3 client\n\nCaused by:\n    0: initial ListObjectsV2 failed\n"
CRT = HEAD + "    1: Client error\n    2: Unknown CRT error\n    3: CRT error "
DNS = "1059: aws-c-io: AWS_IO_DNS_INVALID_NAME, Host name was invalid for dns resolution."


@pytest.mark.parametrize(
    ("said", "permanent", "where", "what"),
    [
        ("2: No signing credentials available", True, "bucket.credentials_file", "no credentials"),
        ("1: invalid AWS credentials", True, "bucket.credentials_file", "no credentials"),
        ("2: The bucket does not exist", True, "bucket.url", "no such bucket"),
        ("2: Forbidden: Access Denied", True, "bucket.credentials_file", "refuses"),
        ("2: Forbidden: The provided token has expired.", True, "bucket.credentials_file", "exp"),
        ("2: Wrong region (expecting eu-west-1)", True, "bucket.region", "another region"),
        ("1: invalid TLS configuration", True, "bucket.ca_bundle", "certificates"),
        ("fuse: device not found, try 'modprobe fuse' first", True, "bucket.url", "cannot mount"),
        ("1: Failed to create FUSE session", True, "bucket.url", "cannot mount"),
        ("1: mount point /m is already mounted", True, "bucket.path", "mount point"),
        ("error: unexpected argument '--x' found", True, "bucket.mount_s3", "flags"),
        ("error while loading shared libraries: x.so", True, "bucket.mount_s3", "a library"),
        (CRT + "1048: aws-c-io: AWS_IO_SOCKET_TIMEOUT", False, "bucket.url", "cannot be reached"),
        (CRT + "1029: AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE", False, "bucket.endpoint_url", "TLS"),
        (CRT + DNS, False, "bucket.url", "cannot be reached"),
        (HEAD + "1: Client error\n2: Request throttled", False, "bucket.url", "cannot be reached"),
        ("thread 'main' panicked", False, "", "ended with exit code 1"),
        ("", False, "", "ended with exit code 1"),
    ],
)  # fmt: skip
def test_last_words(said: str, permanent: bool, where: str, what: str) -> None:
    failure = explain(said, 1, REPLICA)
    assert (failure.permanent, failure.where) == (permanent, where)
    assert what in failure.what
    assert failure.said in said
    assert bool(failure.fix) == bool(where)


def test_a_store_without_host_names_for_buckets() -> None:
    virtual = replace(REPLICA, endpoint_url="https://minio:9000")
    failure = explain(CRT + DNS, 1, virtual)
    assert (failure.permanent, failure.where) == (True, "bucket.force_path_style")
    assert not explain(CRT + DNS, 1, replace(virtual, force_path_style=True)).permanent


def test_a_kill_is_no_reason_to_give_up() -> None:
    failure = explain("INFO all is well", -9, REPLICA)
    assert (failure.permanent, failure.what) == (False, "mount-s3 ended with signal 9")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key abc/+= used", "key *** used"),
        ("aws_secret_access_key = xyz", "aws_secret_access_key = ***"),
        ("AWS_SESSION_TOKEN=xyz, next", "AWS_SESSION_TOKEN=***, next"),
        ("X-Amz-Security-Token: xyz", "X-Amz-Security-Token: ***"),
        ("?X-Amz-Signature=12ab&x=1", "?X-Amz-Signature=***&x=1"),
        ("via http://me:pw@proxy:1/", "via http://***@proxy:1/"),
        ("bucket data is mounted at /m", "bucket data is mounted at /m"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text, ["abc/+=", ""]) == shown
