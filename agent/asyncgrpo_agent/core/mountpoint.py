"""Mountpoint for Amazon S3: its versions, its command line for each role, and its last words.

Written from Mountpoint's documentation and source, v1.24; tested against a stand-in. Every flag and
message of mount-s3 that the agent relies on is in this module. Nothing here starts a process.

What the flags are for. `--metadata-ttl minimal`: each look-up asks S3, and a name that was missing
once is not taken for missing later. Never `--cache`: it switches such memory on for 60 s, and every
adapter is read once. No `--allow-other`: the agent and its children are one user, and nobody else
has business there. `--foreground`: the daemon stays a child.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncgrpo_agent.errors import ConfigError

SOURCE: Final = "mountpoint-s3"  # what the mount table calls it
DEFAULT_PROGRAM: Final = "mount-s3"
# Attempts of one request. Mountpoint's own 10 take about a minute; a replica has others to serve it
# meanwhile, and an outage should become an error that it can name.
REPLICA_ATTEMPTS: Final = 4

Version = tuple[int, int, int]
OLDEST: Final[Version] = (1, 22, 1)
CA_BUNDLE_SINCE: Final[Version] = (1, 23, 0)
CRC64NVME_SINCE: Final[Version] = (1, 23, 0)
MEMORY_TARGET_SINCE: Final[Version] = (1, 24, 0)
# They win over a credentials file, so they must go when one is given.
KEY_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_VERSION_RE: Final = re.compile(r"^mount-s3 (\d+)\.(\d+)\.(\d+)", re.MULTILINE)
_SAID_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSpec:
    """One mount. Empty texts and 0 leave a choice to mount-s3."""

    program: str
    bucket: str
    prefix: str
    mount_point: str
    writable: bool
    allow_delete: bool = True
    endpoint_url: str = ""
    region: str = ""
    force_path_style: bool = False
    credentials_file: str = ""
    profile: str = ""
    ca_bundle: str = ""
    upload_checksums: str = ""
    memory_target_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MountCommand:
    """A command line; what its environment gains and loses; keys that this version cannot obey."""

    argv: tuple[str, ...]
    additions: dict[str, str]
    removals: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


# --- versions --------------------------------------------------------------------------------


def parse_version(said: str, program: str) -> Version:
    """The version that `mount-s3 --version` printed, if it is one to work with."""
    match = _VERSION_RE.search(said)
    if match is None:
        raise ConfigError(
            f"{program} --version does not answer as Mountpoint for Amazon S3 does: {said[:80]!r}",
            where="bucket.mount_s3",
            fix="Give the path of Amazon's mount-s3",
        )
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise ConfigError(
            f"{program} is version {shown(version)}: before 1.22 a file could not be opened again "
            "right after it was closed, and 1.22.0 is known to be faulty",
            where="bucket.mount_s3",
            fix=f"Install mount-s3 {shown(OLDEST)} or newer",
        )
    return version


def shown(version: Version) -> str:
    return ".".join(map(str, version))


# --- the command line ------------------------------------------------------------------------


def mount_command(spec: MountSpec, version: Version) -> MountCommand:
    """How to run mount-s3 of `version`. Raises ConfigError for what that version cannot do."""
    _check_version("bucket.ca_bundle", bool(spec.ca_bundle), version, CA_BUNDLE_SINCE)
    is_new_checksum = spec.writable and spec.upload_checksums == "crc64nvme"
    _check_version("bucket.upload_checksums", is_new_checksum, version, CRC64NVME_SINCE)
    knows_memory = version >= MEMORY_TARGET_SINCE
    argv = [
        *(spec.program, spec.bucket, spec.mount_point),
        *("--foreground", "--metadata-ttl=minimal"),
        *([] if spec.writable else ["--negative-metadata-ttl=minimal", "--read-only"]),
        *_flag("--allow-delete", spec.writable and spec.allow_delete),
        *_option("--prefix", spec.prefix),
        *_option("--endpoint-url", spec.endpoint_url),
        *_option("--region", spec.region),
        *_flag("--force-path-style", spec.force_path_style),
        *_option("--profile", spec.profile),
        *_option("--ca-bundle", spec.ca_bundle),
        *_option("--upload-checksums", spec.upload_checksums if spec.writable else ""),
        *_option("--memory-target", (spec.memory_target_mib or "") if knows_memory else ""),
    ]
    return MountCommand(
        argv=tuple(argv),
        additions=_additions(spec),
        removals=KEY_VARIABLES if spec.credentials_file or spec.profile else (),
        ignored=("bucket.memory_target_mib",)
        if spec.memory_target_mib and not knows_memory
        else (),
    )


def _additions(spec: MountSpec) -> dict[str, str]:
    additions = {}
    if spec.credentials_file:
        additions["AWS_SHARED_CREDENTIALS_FILE"] = spec.credentials_file
        if spec.endpoint_url:  # no store of Amazon's: nobody is there to ask about this machine
            additions["AWS_EC2_METADATA_DISABLED"] = "true"
    if not spec.writable:
        additions["AWS_MAX_ATTEMPTS"] = str(REPLICA_ATTEMPTS)
    return additions


def _flag(name: str, given: bool) -> list[str]:
    return [name] if given else []


def _option(name: str, value: object) -> list[str]:
    return [f"{name}={value}"] if value else []  # one word: no value can pass for a flag


def _check_version(key: str, is_used: bool, version: Version, since: Version) -> None:
    if is_used and version < since:
        raise ConfigError(
            f"mount-s3 {shown(version)} has no such flag",
            where=key,
            fix=f"Install mount-s3 {shown(since)} or newer, or leave the key out",
        )


# --- its last words --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFailure:
    """Why mount-s3 ended. `permanent`: only somebody's hand helps, not another try."""

    permanent: bool
    what: str
    where: str = ""
    fix: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class _Cause:
    pattern: str
    permanent: bool
    what: str
    where: str
    fix: str


_PERMISSIONS: Final = (
    "A replica needs s3:ListBucket and s3:GetObject on the prefix, the trainer s3:PutObject and "
    "s3:AbortMultipartUpload too, and s3:DeleteObject to prune"
)
_NO_FUSE: Final = (
    "Install fuse3; a container needs /dev/fuse and CAP_SYS_ADMIN. Or mount the bucket outside and "
    "set bucket.path in place of bucket.url"
)
# Looked for in the order of this list, each in all of the lines.
_CAUSES: Final = (
    _Cause(
        r"No signing credentials|invalid AWS credentials",
        True,
        "mount-s3 found no credentials",
        "bucket.credentials_file",
        "Give a credentials file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
        "environment, or an instance profile",
    ),
    _Cause(
        r"The bucket does not exist|NoSuchBucket",
        True,
        "there is no such bucket",
        "bucket.url",
        "Create it, or correct its name or bucket.endpoint_url",
    ),
    _Cause(
        r"[Tt]oken.*expired|ExpiredToken",
        True,
        "the credentials have expired",
        "bucket.credentials_file",
        "Renew them",
    ),
    _Cause(
        r"RequestTimeTooSkewed|request time and the current time",
        True,
        "this host's clock is wrong",
        "bucket.url",
        "Set the clock",
    ),
    _Cause(
        r"Forbidden: |Access ?Denied|InvalidAccessKeyId|SignatureDoesNotMatch",
        True,
        "S3 refuses these credentials",
        "bucket.credentials_file",
        _PERMISSIONS,
    ),
    _Cause(
        r"Failed to create S3 Express session",
        True,
        "S3 refuses a session for this directory bucket",
        "bucket.credentials_file",
        "The credentials need s3express:CreateSession",
    ),
    _Cause(
        r"Wrong region",
        True,
        "the bucket is in another region",
        "bucket.region",
        "Correct it, or leave it empty to have it found",
    ),
    _Cause(
        r"Failed to parse endpoint URL|[Ii]nvalid S3 endpoint",
        True,
        "mount-s3 cannot use the endpoint",
        "bucket.endpoint_url",
        "Give https://HOST or https://HOST:PORT",
    ),
    _Cause(
        r"invalid TLS configuration|failed to build TLS context",
        True,
        "mount-s3 cannot use the certificates",
        "bucket.ca_bundle",
        "Give a PEM file of the CA that signed the store's certificate",
    ),
    _Cause(
        r"error while loading shared libraries",
        True,
        "mount-s3 lacks a library",
        "bucket.mount_s3",
        "Install the package fuse (or libfuse2)",
    ),
    _Cause(
        r"fuse: device not found|/dev/fuse|Failed to create FUSE session|fusermount",
        True,
        "mount-s3 cannot mount on this host",
        "bucket.url",
        _NO_FUSE,
    ),
    _Cause(
        r"mount point .* (is already mounted|does not exist|is not a directory)",
        True,
        "mount-s3 cannot use the mount point",
        "bucket.path",
        "See with `findmnt` what is there, or choose another folder",
    ),
    _Cause(
        r"^error: (unexpected argument|invalid value|unrecognized)",
        True,
        "mount-s3 does not take the agent's flags",
        "bucket.mount_s3",
        "Install another version of it",
    ),
    _Cause(
        r"AWS_IO_TLS_ERROR|TLS .*negotiation failed",
        False,
        "no TLS connection to S3",
        "bucket.endpoint_url",
        "If the store's certificate is of a CA of your own, set bucket.ca_bundle",
    ),
    _Cause(
        r"AWS_IO_DNS|AWS_IO_SOCKET|AWS_ERROR_HTTP|Request throttled|Unknown CRT error|"
        r"Unknown response error",
        False,
        "S3 cannot be reached",
        "bucket.url",
        "See whether this host reaches the store; the agent goes on trying",
    ),
)
_PATH_STYLE: Final = _Cause(
    r"AWS_IO_DNS_INVALID_NAME",
    True,
    "the bucket's name is no host at this endpoint",
    "bucket.force_path_style",
    "Set it to true: the store has no host name for each bucket",
)


def explain(said: str, code: int, spec: MountSpec) -> MountFailure:
    """What the last lines `said` by a mount-s3 that ended with `code` mean."""
    lines = said.splitlines()
    virtual_hosts = bool(spec.endpoint_url) and not spec.force_path_style
    for cause in (_PATH_STYLE, *_CAUSES) if virtual_hosts else _CAUSES:
        matching = [line for line in lines if re.search(cause.pattern, line)]
        if matching:
            return MountFailure(
                permanent=cause.permanent,
                what=cause.what,
                where=cause.where,
                fix=cause.fix,
                said=matching[-1].strip()[:_SAID_CHARS],  # causes are told from the outside in
            )
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return MountFailure(
        permanent=False, what=f"mount-s3 ended with {ended}", said=last[:_SAID_CHARS]
    )


# --- secrets ---------------------------------------------------------------------------------

_SECRET_RE: Final = re.compile(
    r"(?i)(secret_?access_?key|session_?token|security-token|signature|credential"
    r"|authorization)(\"?\s*[=:]\s*\"?)([^\s\",;&]+)"
)
_USERINFO_RE: Final = re.compile(r"://[^/@\s]+@")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` fit for a log: without `secrets`, and without what looks like one."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _SECRET_RE.sub(r"\1\2***", text)
    return _USERINFO_RE.sub("://***@", text)
