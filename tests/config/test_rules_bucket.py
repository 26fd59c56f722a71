"""Where the bytes come from: a folder, or a bucket that the agent mounts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncgrpo_agent.config.host import check_host
from asyncgrpo_agent.config.sections import Config, Role
from asyncgrpo_agent.config.sources import Setting, parse
from asyncgrpo_agent.errors import ConfigError

HOME = Path("/home/me")
URL = {"url": "s3://data/runs"}


def configure(bucket: dict[str, str], role: Role = "replica", folder: Path = HOME) -> Config:
    values = {f"bucket.{name}": value for name, value in bucket.items()}
    values |= {"link.join": "join", "model.path": "model", "agent.state_dir": "state"}
    values |= {"engine.python": "./python"}
    if role != "replica":
        values |= {"train.dataset": "d.jsonl", "train.rewards": '["a:b"]'}
    settings = [Setting(path=path, value=text, origin="t") for path, text in values.items()]
    return parse(role=role, cwd=folder, settings=settings)


@pytest.mark.parametrize(
    ("bucket", "path"),
    [
        ({"path": "b"}, "/home/me/b"),
        (URL, "/home/me/state/mount"),
        ({**URL, "path": "/mnt/x"}, "/mnt/x"),
        ({"source": "link"}, "/home/me/state/mirror"),
        ({"source": "link", "path": "state/mirror"}, "/home/me/state/mirror"),
    ],
)
def test_where_the_bucket_is(bucket: dict[str, str], path: str) -> None:
    assert configure(bucket).bucket.path == path


def test_the_defaults_leave_everything_to_mount_s3() -> None:
    bucket = configure(URL).bucket
    assert (bucket.mount_s3, bucket.allow_delete, bucket.memory_target_mib) == ("mount-s3", True, 0)
    assert (bucket.endpoint_url, bucket.region, bucket.upload_checksums) == ("", "", "")


def test_a_config_with_a_url_survives_being_written_out() -> None:
    config = configure({**URL, "region": "eu", "credentials_file": "keys"})
    assert config.bucket.credentials_file == "/home/me/keys"
    assert config.redacted()["bucket"]["credentials_file"] == "/home/me/keys"


@pytest.mark.parametrize(
    ("bucket", "problem"),
    [
        ({}, "bucket.path: missing, and role replica needs it"),
        ({"path": "s3://data/runs"}, "bucket.path (t): the path of a folder, not an address"),
        ({"url": "http://data"}, "bucket.url (t): expected s3://BUCKET/PREFIX/; got 'http://data'"),
        ({"url": "s3://a b/"}, "bucket.url (t): 'a b' is no name of a bucket"),
        ({"path": "b", "region": "eu"}, "bucket.region (t): useless without bucket.url"),
        ({"path": "b", "allow_delete": "no"}, "bucket.allow_delete (t): useless without"),
        ({**URL, "endpoint_url": "minio"}, "bucket.endpoint_url (t): expected https://HOST"),
        ({**URL, "memory_target_mib": "511"}, "bucket.memory_target_mib (t): 511 is too little"),
        ({**URL, "upload_checksums": "md5"}, "bucket.upload_checksums (t): expected off, crc32c"),
        ({**URL, "path": "state"}, "bucket.path (t): a mount on /home/me/state would hide agent.s"),
        ({**URL, "path": "/home"}, "bucket.path (t): a mount on /home would hide model.path"),
        ({"source": "air"}, 'bucket.source (t): expected one of bucket, link, got "air"'),
        ({"source": "link", "path": "b"}, 'bucket.path (t): useless with bucket.source = "link"'),
        ({**URL, "source": "link"}, 'bucket.url (t): useless with bucket.source = "link"'),
        ({"source": "link", "region": "eu"}, "bucket.region (t): useless without bucket.url"),
    ],
)
def test_what_does_not_fit(bucket: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(bucket)
    assert problem in str(caught.value)


@pytest.mark.parametrize("role", ["trainer", "local"])
def test_whoever_writes_adapters_needs_a_place_for_them(role: Role) -> None:
    with pytest.raises(ConfigError) as caught:
        configure({"source": "link"}, role)
    assert str(caught.value) == (
        f"bucket.source (t): role {role} has its adapters in a bucket or a folder. Only replicas"
        " can use link; leave it out"
    )


def test_a_replica_without_a_bucket_needs_no_folder(host: Path) -> None:
    config = configure({"source": "link"}, folder=host)
    check_host(config)
    assert not Path(config.bucket.path).exists()


def test_keys_that_are_written_out_with_their_defaults_need_no_url() -> None:
    assert configure({"path": "b", "region": "", "allow_delete": "yes", "mount_s3": "mount-s3"})


def test_a_local_fleet_has_its_bucket_in_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"bucket\.url \(t\): a local fleet has its bucket"):
        configure(URL, role="local")


# --- the host --------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "join", "python", "mount-s3", "keys", "ca.pem"):
        (tmp_path / name).write_text("line\n")
        (tmp_path / name).chmod(0o600)
    for name in ("python", "mount-s3"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


MOUNTED = {**URL, "mount_s3": "./mount-s3", "credentials_file": "keys", "ca_bundle": "ca.pem"}


def test_a_mount_point_need_not_be_there_yet(host: Path) -> None:
    check_host(configure(MOUNTED, folder=host))


def test_what_mount_s3_lacks_is_told_at_once(host: Path) -> None:
    config = configure({**MOUNTED, "path": "join"}, folder=host)
    (host / "mount-s3").chmod(0o644)
    (host / "keys").chmod(0o640)
    (host / "ca.pem").unlink()
    with pytest.raises(ConfigError) as caught:
        check_host(config)
    assert str(caught.value).replace(str(host), "H").splitlines()[1:] == [
        "  bucket.path (t): H/join is not a folder. Move it away or choose another",
        "  bucket.mount_s3 (t): H/mount-s3 is not an executable file. Install Mountpoint for "
        "Amazon S3, or give the path of its mount-s3",
        "  bucket.ca_bundle (t): H/ca.pem does not exist. Give a PEM file of the store's CA",
        "  bucket.credentials_file (t): H/keys can be read by others (mode 0640). chmod 600 H/keys",
    ]


def test_missing_keys_are_named(host: Path) -> None:
    (host / "keys").unlink()
    with pytest.raises(ConfigError, match=r"bucket\.credentials_file \(t\): .* does not exist"):
        check_host(configure(MOUNTED, folder=host))
