"""An address in S3 as people write it: s3://BUCKET/PREFIX/.

The names are those that Mountpoint takes; stores that are not Amazon's allow more than Amazon. A
prefix is a folder: it gets its final `/`, and keys that no mount can show are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

# The first letter keeps a name from being read as a flag.
_BUCKET_RE: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{2,254}")
_UNREACHABLE: Final = ("", ".", "..")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    """`prefix` is empty or ends in `/`."""

    bucket: str
    prefix: str


def s3_address(url: str) -> S3Address:
    """The parts of `url`; ValueError says what is wrong with it."""
    scheme, separator, rest = url.partition("://")
    if scheme != "s3" or not separator:
        raise ValueError("expected s3://BUCKET/PREFIX/")
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET_RE.fullmatch(bucket):
        raise ValueError(
            f"{bucket!r} is no name of a bucket: 3 to 255 letters, digits, '.', '_' and '-'"
        )
    folders = prefix.removesuffix("/").split("/") if prefix else []
    if any(folder in _UNREACHABLE or not folder.isprintable() for folder in folders):
        raise ValueError(f"no folder can stand for the prefix {prefix!r}")
    return S3Address(bucket=bucket, prefix="".join(f"{folder}/" for folder in folders))


def endpoint_fault(url: str) -> str:
    """What is wrong with the URL of an S3 endpoint; "" when nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"not a URL: {error}"
    if parts.username is not None:
        return "credentials do not belong into a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "expected https://HOST or https://HOST:PORT"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "an endpoint is a host; the bucket belongs into bucket.url"
    return ""
